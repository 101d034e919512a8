"""GPU tensors through NCCL.

Every directed channel has its own communicator, so that its transfers wait neither for those of
another channel nor for compute. Transfers run on NCCL's stream of that communicator:

    compute stream   F0 ────────── F1 ────────── F2 …
    send stream            0 ═══>        1 ═══>             begins when F0's kernels are done
    receive stream    1 ═══>      2 ═══>                    begins when posted, not after compute

A message is one kernel, whatever the number of its tensors (a batch of operations). A send's
tensors stay referenced until the transfer is over. A receive is posted from a side stream, or it
would queue behind the compute already launched; its tensors are recorded on the compute stream,
which waits for them in ``wait``. The host never waits for the device.

**The class.** ``ProcessGroupNCCL``, by name: the same in torch 2.11 to 2.15. For
``init_process_group("nccl")`` newer torch makes ``ProcessGroupNCCL2`` (unless
``TORCH_DIST_USE_NCCL2=0``), which 2.11 does not have. Connected eagerly, a group keeps to one
communicator; otherwise its first transfer would make another, with a warning. Transfers outside
of a batch warn, too.

**Room.** A transfer that has begun holds its stream and some blocks of the GPU until its peer's
has begun, and the devices choose the order. So no two communicators may share a stream (torch
gives out 32 of each priority in turn; sends have the high one, receives the other), and all of them
together must find room: the more there are, the fewer blocks each gets.

**The end.** A transfer whose peer has died never ends by itself. Aborting a communicator ends its
kernels and then frees its memory, for which CUDA waits until all other kernels of the device are
done. So all are aborted at the same time (https://github.com/pytorch/pytorch/issues/119797), by a
thread each: ``abort()`` of torch waits, and NCCL groups aborts of one thread only
(https://github.com/pytorch/pytorch/pull/150690 is for the communicators of one process group).

**Torch's watchdog**, a thread or two per process group, would end the process when a transfer
exceeds a timeout or NCCL reports an error, and print its own messages. A group made with
``TORCH_NCCL_BLOCKING_WAIT=1`` has none. Its ``Work.wait`` would block, but
``Work.block_current_stream``, used here, does not. ``job/device_waits.py`` handles failures.

NCCL before 2.30 refuses two ranks on one GPU; later ones need NCCL_MULTI_RANK_GPU_ENABLE=1.

Source: ``ProcessGroupNCCL.cpp`` of torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work

from procpipe.channel.meta import Meta, allocate, elements
from procpipe.forks import keep_for_ever
from procpipe.torch_internals import in_a_batch, nccl_options

#: Thread blocks NCCL may take for a transfer: two saturate a link, more would slow compute; and for
#: all transfers of a rank, so that they find room on the smallest GPUs (40 multiprocessors).
_MAX_BLOCKS, _MAX_BLOCKS_OF_ALL = 4, 32

#: The same for an operation of several ranks. The pipeline's transfers run beside it.
_MAX_BLOCKS_TOGETHER = 8

#: How many channels one rank may send on, and receive on: torch's streams of one priority, less
#: the few that transports use otherwise.
_MAX_CHANNELS = 29

#: Torch's own limit for a transfer and for an abort, set so high that it is never reached.
_OUT_OF_REACH_S = 30 * 86400.0

#: How long all aborts together may take; each waits for the compute that is queued on the device.
_ABORT_TIMEOUT_S = 30.0


class Communicators:
    """The communicators of one rank, each a process group of torch's, by their ranks and a number.

    Subclasses fill ``_groups``, and note in ``_newest`` the end of what each does last.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._device = device
        self._rank = rank
        # Any: torch's stubs leave out a group's send and recv.
        self._groups: dict[tuple[int, ...], Any] = {}
        self._newest: dict[tuple[int, ...], torch.cuda.Event] = {}
        self._over_stream = torch.cuda.Stream(device, priority=-1)  # waits for transfers' ends
        self._aborting: list[threading.Thread] | None = None
        self._lock = threading.Lock()
        self._connecting_to: tuple[int, ...] = ()
        self._is_initializing = False

    def busy_with(self) -> list[int]:
        """Return the ranks with which transfers are not over; safe in any thread."""
        peers = set(self._connecting_to)
        for (*ranks, _), over in tuple(self._newest.items()):
            if not over.query():
                peers.update(ranks)
        return sorted(peers - {self._rank})

    def drain(self) -> None:
        """Wait until the device has done all transfers, those of this rank's receives too."""
        torch.cuda.synchronize(self._device)

    def abort(self) -> bool:
        """End all transfers, whatever their state, within 30 seconds; see ``DeviceTransfers``.

        Returns False while a communicator is being connected, which cannot be ended.
        """
        deadline_s = time.monotonic() + _ABORT_TIMEOUT_S
        with self._lock:
            if self._aborting is None:
                self._aborting = [
                    threading.Thread(target=_abort, args=(group,), daemon=True)
                    for group in tuple(self._groups.values())
                ]
                for thread in self._aborting:
                    thread.start()
            aborting = self._aborting
        for thread in aborting:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not (self._is_initializing or any(thread.is_alive() for thread in aborting))

    def close(self) -> None:
        """Abort and drop the communicators."""
        if not self.abort():
            keep_for_ever(self._groups.copy())  # the destructors would wait, too
        self._newest.clear()
        self._groups.clear()

    def _connect(
        self,
        key: tuple[int, ...],
        store: Store,
        place: tuple[int, int],
        num_blocks: int,
        begin: Callable[[Any, list[Tensor]], Work],
        *,
        is_high_priority: bool,
    ) -> None:
        """Make and connect a communicator, first operation included, which ``begin`` begins.

        NCCL connects ranks in that; it blocks the hosts of all of them. ``place`` is this process's
        number in the group, and how many there are; an operation may take ``num_blocks`` thread
        blocks.
        """
        from torch.distributed import ProcessGroupNCCL

        options = nccl_options(
            ProcessGroupNCCL, _OUT_OF_REACH_S, num_blocks, is_high_priority_stream=is_high_priority
        )
        self._connecting_to = key[:-1]
        self._is_initializing = True
        try:
            own = PrefixStore(f"nccl/{'-'.join(map(str, key))}", store)
            with _environment_variable("TORCH_NCCL_BLOCKING_WAIT", "1"):
                group: Any = ProcessGroupNCCL(own, *place, options)  # not connected
            token = torch.zeros(1, dtype=torch.uint8, device=self._device)
            group.eager_connect_single_device(self._device)
            self._groups[key] = group
            self._is_initializing = False
            begin(group, [token]).block_current_stream()
            torch.cuda.synchronize(self._device)
        finally:
            self._connecting_to, self._is_initializing = (), False

    def _note(self, key: tuple[int, ...], work: Work) -> torch.cuda.Event:
        """Return what is recorded at the end of an operation."""
        with torch.cuda.stream(self._over_stream):
            work.block_current_stream()
            over: torch.cuda.Event = self._over_stream.record_event()
        self._newest[key] = over
        return over


class NcclTransport(Communicators):
    """One two-rank communicator per directed channel."""

    copies_at_once = False
    inline_bytes = 0
    max_posted = 1  # a receive that waits for its sender occupies part of the GPU

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._receive_stream = torch.cuda.Stream(device)

    def connect(self, store: Store, channels: Iterable[tuple[int, int, int]]) -> None:
        """Connect this rank's communicators; waits for the peers.

        ``channels`` holds ``(source rank, destination rank, channel id)`` of all channels of the
        job. All ranks connect theirs in this order, since each blocks the host until its other end
        does the same. Raises ``ValueError`` if a rank would have more channels than there are
        streams.
        """
        channels = list(channels)
        num_blocks = _num_blocks(channels)
        for channel in channels:
            if self._rank in channel[:2]:
                is_sender = self._rank == channel[0]
                self._connect(
                    channel,
                    store,
                    (0 if is_sender else 1, 2),
                    num_blocks,
                    partial(_transfer, is_sender=is_sender),
                    is_high_priority=is_sender,
                )

    def post_send(
        self, tensors: list[Tensor], peer: int, channel_id: int
    ) -> tuple[NcclSending, bytes]:
        """Begin to send dense tensors after the current stream has made them."""
        return NcclSending(*self._begin((self._rank, peer, channel_id), tensors)), b""

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Allocate the tensors of a message and begin to fill them; returns at once."""
        with torch.cuda.stream(self._receive_stream):
            tensors = allocate(meta, self._device)
            work, _ = self._begin((peer, self._rank, channel_id), tensors)
            return tensors, partial(self._wait_received, work, tensors)

    def _begin(
        self, channel: tuple[int, int, int], tensors: list[Tensor]
    ) -> tuple[Work | None, torch.cuda.Event | None]:
        # As bytes, since NCCL supports neither all dtypes nor empty tensors.
        parts = [elements(tensor).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if not parts:
            return None, None
        work = _transfer(self._groups[channel], parts, is_sender=channel[0] == self._rank)
        return work, self._note(channel, work)

    def _wait_received(self, work: Work | None, tensors: list[Tensor]) -> None:
        """Make the current stream wait for received tensors; the host goes on."""
        if work is not None:
            work.block_current_stream()
        compute = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            tensor.record_stream(compute)


class NcclGroup(Communicators):
    """One communicator of several ranks, for operations of them all.

    These begin after what is queued on the current stream.
    """

    def __init__(self, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._key = (*ranks, 0)

    def connect(self, store: Store) -> None:
        """Connect to the other processes of the group; blocks until they do the same."""
        *ranks, _ = self._key
        self._connect(
            self._key,
            store,
            (ranks.index(self._rank), len(ranks)),
            _MAX_BLOCKS_TOGETHER,
            lambda group, tokens: group.allreduce(tokens),
            is_high_priority=True,
        )

    def begin(self, operate: Callable[[Any], Work]) -> Work:
        """Begin an operation of torch's process group; the host never waits for it."""
        work = operate(self._groups[self._key])
        self._note(self._key, work)
        return work


class NcclSending(NamedTuple):
    """The send of one message's tensors."""

    work: Work | None
    over: torch.cuda.Event | None

    def wait(self) -> None:
        """Make the current stream wait for the transfer; the host goes on."""
        if self.work is not None:
            self.work.block_current_stream()

    def is_done(self) -> bool:
        """Return whether the device has completed the transfer."""
        return self.over is None or self.over.query()


def _num_blocks(channels: list[tuple[int, int, int]]) -> int:
    """Return how many thread blocks a transfer may take; the same on every rank."""
    for end, does in (0, "send"), (1, "receive"):
        ((rank, most),) = Counter(channel[end] for channel in channels).most_common(1)
        if most > _MAX_CHANNELS:
            raise ValueError(
                f"rank {rank} would {does} on {most} channels by NCCL, but there can be "
                f"{_MAX_CHANNELS}: use fewer partitions a stage, or fewer skips between stages"
            )
    ends = Counter(rank for channel in channels for rank in channel[:2])
    return max(1, min(_MAX_BLOCKS, _MAX_BLOCKS_OF_ALL // max(ends.values())))


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


@contextlib.contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable in this block, in which torch's constructor reads it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _abort(group: Any) -> None:
    """Abort a communicator; ignore errors of one that is broken already."""
    with contextlib.suppress(RuntimeError):
        group.abort()
