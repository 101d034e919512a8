"""GPU tensors through NCCL.

Every directed channel has a communicator of its own, so that its transfers neither wait for those
of another channel nor for compute. Transfers run on NCCL's stream of that communicator:

    compute stream   F0 ────────── F1 ────────── F2 …
    send stream            0 ═══>        1 ═══>             begins when F0's kernels are done
    receive stream    1 ═══>      2 ═══>                    begins when posted, not after compute

A send's tensors stay referenced until the transfer is over. A receive is posted from a side
stream, or it would queue up behind the compute already launched; its tensors are recorded on the
compute stream, which waits for them in ``wait``. The host never waits for the device.

Two ranks on one GPU are refused by NCCL before 2.30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from procpipe.channel.meta import Meta, allocate
from procpipe.torch_internals import nccl_options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store, Work

__all__ = ["NcclTransport"]

#: Thread blocks NCCL may take for a transfer: two saturate a link, more would slow compute.
_MAX_BLOCKS = 4


class NcclTransport:
    """One two-rank communicator a directed channel; building it waits for the peers.

    All ranks build theirs in one global order, since the first use of a communicator blocks the
    host until its other end does the same.

    Args:
        store: a store that all ranks share, with keys of this transport's own.
        rank: this rank.
        device: this rank's GPU.
        channels: ``(source rank, destination rank, kind)`` of every channel of the job, in an
            order that all ranks share.
        timeout_s: how long a transfer may take.
    """

    needs_acknowledgement = False
    blocks = False  # it is the stream that waits
    copies_at_once = False
    inline_bytes = 0
    max_posted = 1  # a receive that waits for its sender occupies part of the GPU

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        channels: Iterable[tuple[int, int, int]],
        timeout_s: float,
    ) -> None:
        self._device = device
        self._rank = rank
        # Any: torch's stubs leave out a group's send and recv.
        self._groups: dict[tuple[int, int, int], Any] = {}
        self._receive_stream = torch.cuda.Stream(device)
        for channel in channels:
            if rank in channel[:2]:
                self._groups[channel] = _connected(store, rank, device, channel, timeout_s)

    def post_send(self, tensors: list[Tensor], peer: int, kind: int) -> tuple[NcclPending, bytes]:
        """Begin to send contiguous tensors once the current stream has made them."""
        group = self._groups[self._rank, peer, kind]
        works = [group.send([bytes_], 1, 0) for bytes_ in _as_bytes(tensors)]
        return NcclPending(works, tensors, None), b""

    def post_receive(
        self, meta: Meta, peer: int, kind: int, note: bytes
    ) -> tuple[list[Tensor], NcclPending]:
        """Allocate the tensors of a message and begin to fill them; returns at once."""
        group = self._groups[peer, self._rank, kind]
        with torch.cuda.stream(self._receive_stream):
            tensors = allocate(meta, self._device)
            works = [group.recv([bytes_], 0, 0) for bytes_ in _as_bytes(tensors)]
        return tensors, NcclPending(works, tensors, self._device)

    def drain(self) -> None:
        """Wait until the device has done all transfers, those of this rank's receives too."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Abort and drop the communicators; nothing may be under way that somebody needs."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()


class NcclPending:
    """Transfers of one message's tensors."""

    def __init__(
        self, works: list[Work], tensors: list[Tensor], receiving: torch.device | None
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._receiving = receiving

    def wait(self) -> None:
        """Let the current stream wait for the transfers; the host goes on."""
        for work in self._works:
            work.wait()
        if self._receiving is not None:
            compute = torch.cuda.current_stream(self._receiving)
            for tensor in self._tensors:
                tensor.record_stream(compute)

    def is_done(self) -> bool:
        """Tell whether all transfers are over on the device."""
        return all(work.is_completed() for work in self._works)


def _as_bytes(tensors: list[Tensor]) -> list[Tensor]:
    """Return views that NCCL can carry, which knows neither all dtypes nor empty tensors."""
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]


def _connected(
    store: Store,
    rank: int,
    device: torch.device,
    channel: tuple[int, int, int],
    timeout_s: float,
) -> Any:
    """Build the communicator of one channel, sender as 0, receiver as 1, and connect it."""
    from torch.distributed import PrefixStore, ProcessGroupNCCL

    source, destination, kind = channel
    options = nccl_options(ProcessGroupNCCL, timeout_s, _MAX_BLOCKS)
    prefix = f"nccl/{source}-{destination}/{kind}"
    end = 0 if rank == source else 1
    group: Any = ProcessGroupNCCL(PrefixStore(prefix, store), end, 2, options)
    token = torch.zeros(1, device=device)
    (group.send([token], 1, 0) if end == 0 else group.recv([token], 0, 0)).wait()
    torch.cuda.synchronize(device)
    return group
