"""GPU tensors through NCCL.

Each directed pair of ranks has a communicator of its own, for all channels from one to the other,
so that its transfers wait neither for those of another pair nor for compute. They run on NCCL's
stream of that communicator:

    compute stream   F0 ────────── F1 ────────── F2 …
    send stream            0 ═══>        1 ═══>             begins when F0's kernels are done
    receive stream    1 ═══>      2 ═══>                    begins when posted, not after compute

A message is one kernel, whatever the number of its tensors (a batch of operations). A send's
tensors stay referenced until the transfer is over. A receive is posted from a side stream, or it
would queue behind the compute already launched; its tensors are recorded on the compute stream,
which waits for them in ``wait``. The host never waits for the device.

**Order.** Transfers of a communicator run in the order in which both ends begin them. The programs
of a plan list sends and receives of a pair in the same order (``plan/program.py``). A note counts
the messages of the pair, and a receive is begun only after those before it: an allowance that is
left over (``Receiver.forgo``) could allow it too early.

**The class.** ``ProcessGroupNCCL``, by name: the same in torch 2.11 to 2.15. For
``init_process_group("nccl")`` newer torch makes ``ProcessGroupNCCL2`` (unless
``TORCH_DIST_USE_NCCL2=0``), which 2.11 does not have. Connected eagerly, a group keeps to one
communicator; otherwise its first transfer would make another, with a warning. Transfers outside
of a batch warn, too.

**Room.** A transfer that has begun holds its stream and some blocks of the GPU until its peer's
has begun, and the devices choose the order. So no two communicators may share a stream, of which
torch gives out 32 of high priority in turn; nor a hardware queue (``job/devices.py``). All of a
rank's together may take a part of its GPU: the more there are, the fewer blocks each gets. Their
priority is high at both ends: a receive that waits for compute would keep the sender's blocks.

**The end.** Aborting a communicator frees its memory, for which CUDA waits until all other kernels
of the device are done. So it is done only after ``drain``. A transfer whose peer has died never
ends, and an abort of it may hang in NCCL (https://github.com/NVIDIA/nccl/issues/1777): after a
failure nothing is aborted, and the process ends without waiting for its device.

**Torch's watchdog**, a thread or two per process group, would end the process when a transfer
exceeds a timeout or NCCL reports an error, and print its own messages. A group made with
``TORCH_NCCL_BLOCKING_WAIT=1`` has none. Its ``Work.wait`` would block, but
``Work.block_current_stream``, used here, does not.

Source: ``ProcessGroupNCCL.cpp`` of torch 2.11 and 2.15.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work

from procpipe.channel.base import DeviceTransfers, Sending
from procpipe.channel.meta import Meta, allocate, elements
from procpipe.torch_internals import in_a_batch, nccl_options

#: The part of a GPU's multiprocessors that all transfers of a rank may take, each with a block; and
#: the most for one, or for an operation of several ranks. On a GPU of 132, four communicators get 8
#: blocks each.
_PART, _MAX_BLOCKS = 1 / 4, 8

#: How many communicators a rank may have: torch's streams of high priority, less the few that
#: are used otherwise.
_MAX_COMMUNICATORS = 29

_WITHOUT_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"

#: Torch's own limit for a transfer, set so high that it is never reached.
_OUT_OF_REACH_S = 30 * 86400.0

#: A note: how many messages the sender has sent to the receiver before, on all channels.
_NOTE = struct.Struct("<Q")


class Communicators(DeviceTransfers):
    """The communicators of one rank, each a process group of torch's, by the ranks in it."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._rank = rank
        # Any: torch's stubs leave out a group's send and recv.
        self._groups: dict[tuple[int, ...], Any] = {}

    def drain(self) -> None:
        """Wait until the device has done all transfers, those of this rank's receives too."""
        torch.cuda.synchronize(self._device)
        self._begun.clear()

    def close(self) -> None:
        """Abort the communicators, which must be idle."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()

    def _connect(
        self,
        ranks: tuple[int, ...],
        store: Store,
        num_blocks: int,
        begin: Callable[[Any, list[Tensor]], Work],
    ) -> None:
        """Make and connect a communicator, first operation included, which ``begin`` begins.

        NCCL connects ranks in that; it blocks the hosts of all of them. An operation may take
        ``num_blocks`` thread blocks, or fewer, if another rank can give only fewer.
        """
        from torch.distributed import ProcessGroupNCCL

        own = PrefixStore(f"nccl/{'-'.join(map(str, ranks))}", store)
        is_connected = threading.Event()
        self._add(ranks, is_connected.is_set)
        own.set(f"blocks/{self._rank}", str(num_blocks))
        num_blocks = min(int(own.get(f"blocks/{rank}")) for rank in ranks)
        options = nccl_options(ProcessGroupNCCL, _OUT_OF_REACH_S, num_blocks)
        place = ranks.index(self._rank), len(ranks)
        before = os.environ.get(_WITHOUT_WATCHDOG, "0")
        os.environ[_WITHOUT_WATCHDOG] = "1"  # read by the constructor
        try:
            group: Any = ProcessGroupNCCL(own, *place, options)  # not connected
        finally:
            os.environ[_WITHOUT_WATCHDOG] = before
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        group.eager_connect_single_device(self._device)
        self._groups[ranks] = group
        begin(group, [token]).block_current_stream()
        torch.cuda.current_stream(self._device).synchronize()
        is_connected.set()
        self._look(ranks)


class NcclTransport(Communicators):
    """One two-rank communicator per directed pair of ranks, its key ``(source, destination)``."""

    holds_device = True  # NCCL's are rendezvous
    inline_bytes = -1

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._receive_stream = torch.cuda.Stream(device)
        self._num_sent: Counter[int] = Counter()
        self._num_posted: Counter[int] = Counter()
        self._early: dict[tuple[int, int], Receiving] = {}  # by source and number

    def connect(self, store: Store, channels: Iterable[tuple[int, int, int]]) -> None:
        """Connect this rank's communicators; waits for the peers.

        ``channels`` holds ``(source rank, destination rank, channel id)`` of all channels of the
        job. Raises ``ValueError`` if a rank would have more communicators than there are streams.
        """
        pairs = {channel[:2] for channel in channels}
        num_multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
        num_blocks = blocks_of(self._rank, pairs, num_multiprocessors)
        # Pairs of neighbours do not wait for one another: 0 and 1, 2 and 3, … are first.
        for pair in sorted(pairs, key=lambda pair: (min(pair) % 2, pair)):
            if self._rank in pair:
                is_sender = self._rank == pair[0]
                self._connect(pair, store, num_blocks, partial(_transfer, is_sender=is_sender))

    def post_send(
        self, tensors: list[Tensor], peer: int, channel_id: int
    ) -> tuple[Sending | None, bytes]:
        """Begin to send dense tensors after the current stream has made them."""
        note = _NOTE.pack(self._num_sent[peer])
        self._num_sent[peer] += 1
        work = self._begin((self._rank, peer), tensors)
        if work is None:
            return None, note
        return Sending(work.block_current_stream, work.is_completed), note

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Allocate the tensors of a message and begin to fill them; returns at once."""
        (number,) = _NOTE.unpack(note)
        with torch.cuda.stream(self._receive_stream):
            receiving = Receiving(allocate(meta, self._device))
            self._early[peer, number] = receiving
            while next_one := self._early.pop((peer, self._num_posted[peer]), None):
                self._num_posted[peer] += 1
                next_one.work = self._begin((peer, self._rank), next_one.tensors)
                next_one.is_posted = True
        return receiving.tensors, receiving.wait

    def _begin(self, pair: tuple[int, int], tensors: list[Tensor]) -> Work | None:
        # As bytes, since NCCL supports neither all dtypes nor empty tensors.
        parts = [elements(tensor).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if not parts:
            return None
        work = _transfer(self._groups[pair], parts, is_sender=pair[0] == self._rank)
        self._add(pair, work.is_completed)
        return work


class NcclGroup(Communicators):
    """One communicator of several ranks, for operations of them all.

    These begin after what is queued on the current stream.
    """

    def __init__(self, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._ranks = tuple(ranks)

    def connect(self, store: Store) -> None:
        """Connect to the other processes of the group; blocks until they do the same."""
        self._connect(
            self._ranks, store, _MAX_BLOCKS, lambda group, tokens: group.allreduce(tokens)
        )

    def begin(self, operate: Callable[[Any], Work]) -> Work:
        """Begin an operation of torch's process group; the host never waits for it."""
        work = operate(self._groups[self._ranks])
        self._add(self._ranks, work.is_completed)
        return work


@dataclass
class Receiving:
    """The receive of one message's tensors."""

    tensors: list[Tensor]
    is_posted: bool = False
    work: Work | None = None  # None if they have no elements

    def wait(self) -> None:
        """Make the current stream wait for received tensors; the host goes on."""
        assert self.is_posted, "a program allows all that was sent before what it takes"
        if self.work is not None:
            self.work.block_current_stream()
        for tensor in self.tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def blocks_of(rank: int, pairs: Iterable[tuple[int, int]], num_multiprocessors: int) -> int:
    """Return how many thread blocks each transfer of a rank may take; pure.

    A power of two, to which NCCL would round up (https://github.com/NVIDIA/nccl/issues/1198).
    """
    num_communicators = sum(rank in pair for pair in pairs)
    if num_communicators > _MAX_COMMUNICATORS:
        raise ValueError(
            f"rank {rank} would exchange tensors by NCCL with so many ranks that it had "
            f"{num_communicators} communicators, but there can be {_MAX_COMMUNICATORS}: use fewer "
            "skips between distant stages"
        )
    most = min(_MAX_BLOCKS, int(num_multiprocessors * _PART / max(1, num_communicators)))
    return 1 << max(0, most.bit_length() - 1)


def _transfer(group: Any, parts: list[Tensor], *, is_sender: bool) -> Work:
    """Begin to send or receive in one kernel, after the work queued on the current stream."""

    def begin() -> None:
        for part in parts:
            if is_sender:
                group.send([part], 1, 0)
            else:
                group.recv([part], 0, 0)

    work: Work = in_a_batch(group, begin)
    return work
