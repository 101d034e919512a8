"""GPU tensors through CUDA IPC: between processes that share one GPU.

A message's tensors are copied into a slot, memory of the sender that the receiver opens, too, and
out of it into tensors of the receiver's own. Both copies run on side streams:

    sender                                  slot                       receiver
    waits for the tensors to be made
    waits until taken = k - 1
    copies them in         ─────────────>  tensors
    writes                 ─────────────>  filled = k  ──────────────>  waits until filled = k
                                           tensors     ──────────────>  copies them out
    may use the slot again <─────────────  taken = k   <──────────────  writes

All of this is queued on the GPU; the hosts go on. They exchange a token, "slot n holds message k",
and a flag, one byte per slot in a page that both map: "in use" until the receiver has queued its
part, then "free". So queued work waits only for work queued earlier, by whichever process, and no
cycle of waits can form.

A channel has as many slots as it ever had messages in use at a time. A slot that has become too
small is dropped: the receiver closes it and sets its flag; only then is its memory freed. At the
end all slots are dropped (``drain``), and ranks wait for one another before they free them
(``close``). A process that fails frees nothing, since others may be reading.

A peer that has died never writes what a stream waits for, so after a failure this process ends
without waiting for its device. The driver keeps memory that another process has open until that one
ends, too; what a peer still copies is not used, since its next call fails.

Streams write only to memory of their own GPU, possibly allocated by another process: a write to
another GPU's is refused from CUDA 13.1 on (https://github.com/NVIDIA/nccl/issues/2052).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from procpipe.channel.base import DeviceTransfers
from procpipe.channel.gpu import HANDLE_BYTES, Gpu
from procpipe.channel.meta import Meta, allocate, layout

#: States of a slot, the values of its flag.
_FREE, _IN_USE, _CLOSED = 0, 1, 2

#: Most slots of a process, dropped ones included; far more than are ever needed. So large is its
#: file of flags, a byte a slot.
FLAGS_BYTES = 1 << 20

#: A slot begins with its two numbers.
_FILLED, _TAKEN, _TENSORS = 0, 128, 256

#: The driver cuts smaller allocations out of a block, which it would share as a whole.
_GRANULE = 2 << 20


class CudaIpcTransport(DeviceTransfers):
    """Slots of one GPU's memory between this rank and those that share the GPU.

    ``own_file`` is the descriptor of this rank's file of flags, of ``FLAGS_BYTES`` zeros, and
    ``files`` has those of its peers; they may be closed afterwards.
    """

    holds_device = False
    inline_bytes = -1

    def __init__(self, gpu: Gpu, own_file: int, files: Mapping[int, int]) -> None:
        super().__init__()
        self._gpu = gpu
        self._flags = mmap.mmap(own_file, FLAGS_BYTES)
        self._flags_of = {peer: mmap.mmap(file, FLAGS_BYTES) for peer, file in files.items()}
        self._numbers = itertools.count()
        self._slots: defaultdict[tuple[int, int], list[_Slot]] = defaultdict(list)
        self._dropped: list[_Slot] = []
        # One for each channel and direction, so that no channel waits for another. Torch gives out
        # 32 of each priority in turn, so the one that the host waits for is none of these.
        new_stream = partial(torch.cuda.Stream, gpu.device)
        self._sending: defaultdict[tuple[int, int], torch.cuda.Stream] = defaultdict(new_stream)
        self._receiving: defaultdict[tuple[int, int], torch.cuda.Stream] = defaultdict(new_stream)
        self._making = new_stream(priority=-1)
        self._opened: dict[tuple[int, int], _OpenedSlot] = {}
        self._closing: list[_OpenedSlot] = []

    def post_send(
        self, tensors: list[Tensor], peer: int, channel_id: int
    ) -> tuple[CudaIpcSent, bytes]:
        """Queue the copies of dense tensors into a slot, behind the current stream."""
        gpu = self._gpu
        offsets, size = layout([tensor.nbytes for tensor in tensors])
        slot, dropped = self._free_slot(peer, channel_id, size)
        stream = self._sending[peer, channel_id]
        stream.wait_stream(torch.cuda.current_stream(gpu.device))
        gpu.wait(stream, slot.address + _TAKEN, slot.serial)
        address = slot.address + _TENSORS
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.nbytes:
                gpu.copy(stream, address + offset, tensor.data_ptr(), tensor.nbytes)
        slot.serial += 1
        gpu.write(stream, slot.address + _FILLED, slot.serial)
        self._flags[slot.number] = _IN_USE
        copied = stream.record_event()
        self._add((peer,), copied.query)
        # What opens the slot, its number, that of its message, and slots that have been dropped.
        note = slot.handle + array("Q", (slot.number, slot.serial, *dropped)).tobytes()
        return CudaIpcSent(slot, slot.serial, copied), note

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Queue the copies of a message out of its slot, into new tensors."""
        gpu = self._gpu
        handle, numbers = note[:HANDLE_BYTES], memoryview(note)[HANDLE_BYTES:]
        number, serial, *dropped = numbers.cast("Q")
        self._closing += [self._opened.pop((peer, each)) for each in dropped]
        self._close_unused()
        slot = self._opened.get((peer, number))
        if slot is None:
            slot = _OpenedSlot(number, gpu.open(handle), self._flags_of[peer])
            self._opened[peer, number] = slot
        stream = self._receiving[peer, channel_id]
        with torch.cuda.stream(stream):
            tensors = allocate(meta, gpu.device)
        gpu.wait(stream, slot.address + _FILLED, serial)
        address = slot.address + _TENSORS
        offsets, _ = layout([tensor.nbytes for tensor in tensors])
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.nbytes:
                gpu.copy(stream, tensor.data_ptr(), address + offset, tensor.nbytes)
        gpu.write(stream, slot.address + _TAKEN, serial)
        slot.copied = stream.record_event()
        self._add((peer,), slot.copied.query)
        slot.flags[slot.number] = _FREE  # only once the write is queued
        return tensors, partial(_wait_received, tensors, slot.copied)

    def drain(self) -> None:
        """Wait until no transfer is under way, at the peers either; close their memory."""
        gpu = self._gpu
        slots = [*self._dropped, *itertools.chain.from_iterable(self._slots.values())]
        for slot in slots:
            gpu.wait(self._making, slot.address + _TAKEN, slot.serial)
        torch.cuda.synchronize(gpu.device)
        self._closing += self._opened.values()
        self._opened.clear()
        self._close_unused()
        self._dropped = slots
        self._slots.clear()
        self._begun.clear()

    def close(self) -> None:
        """Free what all peers have closed (all, after ``drain`` on all ranks); drop the rest."""
        self._free_closed()
        for held in (self._slots, self._dropped, self._opened, self._closing, self._flags_of):
            held.clear()

    # -- slots of this rank, to send from -------------------------------------------------------

    def _free_slot(self, peer: int, channel_id: int, size: int) -> tuple[_Slot, Sequence[int]]:
        """Return a free slot that is large enough, and the numbers of slots just dropped."""
        slots = self._slots[peer, channel_id]
        free = [slot for slot in slots if self._flags[slot.number] == _FREE]
        fitting = [slot for slot in free if slot.size_bytes >= size]
        if fitting:
            slots.remove(fitting[0])
            slots.append(fitting[0])  # used in turn: the one free for longest waits least
            return fitting[0], ()
        for slot in free:
            slots.remove(slot)
        self._dropped += free
        self._free_closed()
        slots.append(self._new_slot(size))
        return slots[-1], [slot.number for slot in free]

    def _new_slot(self, size: int) -> _Slot:
        gpu, stream = self._gpu, self._making
        total = -(-(_TENSORS + size) // _GRANULE) * _GRANULE
        address = gpu.allocate(total)
        # Old contents must not be taken for a message's number.
        gpu.clear(stream, address, total)
        stream.synchronize()
        number, handle = next(self._numbers), gpu.export(address)
        return _Slot(number, address, handle, total - _TENSORS, self._flags)

    def _free_closed(self) -> None:
        closed = [slot for slot in self._dropped if self._flags[slot.number] == _CLOSED]
        for slot in closed:
            self._dropped.remove(slot)
            self._gpu.free(slot.address)

    # -- slots of peers, to receive from --------------------------------------------------------

    def _close_unused(self) -> None:
        """Close dropped slots whose copies are done; the others with a later message."""
        for slot in [slot for slot in self._closing if slot.copied.query()]:
            self._closing.remove(slot)
            with contextlib.suppress(RuntimeError):  # its process may have ended
                self._gpu.close(slot.address)
            slot.flags[slot.number] = _CLOSED


@dataclass(eq=False)
class _Slot:
    """A slot of this process, to send from."""

    number: int
    address: int
    handle: bytes
    size_bytes: int
    flags: mmap.mmap
    serial: int = 0  # of its last message


@dataclass(eq=False)
class _OpenedSlot:
    """A slot of another process, to receive from."""

    number: int
    address: int
    flags: mmap.mmap
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # its last message


@dataclass
class CudaIpcSent:
    """A message on its way into a slot, or out of it."""

    slot: _Slot
    serial: int
    copied: torch.cuda.Event  # into the slot

    def wait(self) -> None:
        """Make the current stream wait until the tensors are in the slot; the host goes on."""
        torch.cuda.current_stream(self.copied.device).wait_event(self.copied)

    def is_done(self) -> bool:
        """Return whether the tensors are in the slot and the receiver has queued its part."""
        slot = self.slot
        is_taken = slot.serial > self.serial or slot.flags[slot.number] != _IN_USE
        return is_taken and bool(self.copied.query())


def _wait_received(tensors: Sequence[Tensor], copied: torch.cuda.Event) -> None:
    """Make the current stream wait until the tensors are filled; the host goes on."""
    compute = torch.cuda.current_stream(copied.device)
    compute.wait_event(copied)
    for tensor in tensors:
        tensor.record_stream(compute)
