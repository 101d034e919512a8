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

A channel has as many slots as it ever had messages in use at a time, and others for larger ones,
until the end: then receivers close them and set their flags (``drain``), and ranks wait for one
another before they free them (``close``). A process that fails frees nothing, since others may be
reading.

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
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from procpipe.channel.base import DeviceTransfers, Sending
from procpipe.channel.gpu import HANDLE_BYTES, Gpu
from procpipe.channel.meta import Meta, allocate, layout

#: States of a slot, the values of its flag.
_FREE, _IN_USE, _CLOSED = 0, 1, 2

#: Most slots of a process, far more than are ever needed. So large is its file of flags, a byte a
#: slot.
FLAGS_BYTES = 1 << 20

#: A note: what opens the slot, its number, that of its message.
_NOTE = struct.Struct(f"<{HANDLE_BYTES}sQQ")

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
        # One for each channel and direction, so that no channel waits for another. Torch gives out
        # 32 of each priority in turn, so the one that the host waits for is none of these.
        new_stream = partial(torch.cuda.Stream, gpu.device)
        self._sending: defaultdict[tuple[int, int], torch.cuda.Stream] = defaultdict(new_stream)
        self._receiving: defaultdict[tuple[int, int], torch.cuda.Stream] = defaultdict(new_stream)
        self._making = new_stream(priority=-1)
        self._opened: dict[tuple[int, int], int] = {}  # addresses here, by peer and slot

    def post_send(self, tensors: list[Tensor], peer: int, channel_id: int) -> tuple[Sending, bytes]:
        """Queue the copies of dense tensors into a slot, behind the current stream."""
        gpu = self._gpu
        offsets, size = layout([tensor.nbytes for tensor in tensors])
        slot = self._free_slot(self._slots[peer, channel_id], size)
        stream = self._sending[peer, channel_id]
        stream.wait_stream(torch.cuda.current_stream(gpu.device))
        gpu.wait(stream, slot.address + _TAKEN, slot.serial)
        address = slot.address + _TENSORS
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.nbytes:
                gpu.copy(stream, address + offset, tensor.data_ptr(), tensor.nbytes)
        slot.serial += 1
        serial = slot.serial
        gpu.write(stream, slot.address + _FILLED, serial)
        self._flags[slot.number] = _IN_USE
        copied = stream.record_event()
        self._add((peer,), copied.query)

        def is_done() -> bool:
            """Return whether the tensors are in the slot and the receiver has queued its part."""
            is_taken = slot.serial > serial or self._flags[slot.number] != _IN_USE
            return is_taken and copied.query()

        sending = Sending(lambda: torch.cuda.current_stream(gpu.device).wait_event(copied), is_done)
        return sending, _NOTE.pack(slot.handle, slot.number, serial)

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Queue the copies of a message out of its slot, into new tensors."""
        gpu = self._gpu
        handle, number, serial = _NOTE.unpack(note)
        slot = self._opened.get((peer, number))
        if slot is None:
            slot = self._opened[peer, number] = gpu.open(handle)
        stream = self._receiving[peer, channel_id]
        with torch.cuda.stream(stream):
            tensors = allocate(meta, gpu.device)
        gpu.wait(stream, slot + _FILLED, serial)
        offsets, _ = layout([tensor.nbytes for tensor in tensors])
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.nbytes:
                gpu.copy(stream, tensor.data_ptr(), slot + _TENSORS + offset, tensor.nbytes)
        gpu.write(stream, slot + _TAKEN, serial)
        copied = stream.record_event()
        self._add((peer,), copied.query)
        self._flags_of[peer][number] = _FREE  # only once the write is queued
        return tensors, partial(_wait_received, tensors, copied)

    def drain(self) -> None:
        """Wait until no transfer is under way on this rank's device; close the peers' memory."""
        torch.cuda.synchronize(self._gpu.device)
        for (peer, number), address in self._opened.items():
            with contextlib.suppress(RuntimeError):  # its process may have ended
                self._gpu.close(address)
            self._flags_of[peer][number] = _CLOSED
        self._opened.clear()
        self._begun.clear()

    def close(self) -> None:
        """Free what the peers have closed (all, after ``drain`` on all ranks); drop the rest."""
        for slot in itertools.chain.from_iterable(self._slots.values()):
            if self._flags[slot.number] == _CLOSED:
                self._gpu.free(slot.address)
        for held in (self._slots, self._opened, self._flags_of):
            held.clear()

    def _free_slot(self, slots: list[_Slot], size: int) -> _Slot:
        """Return one of a channel's slots that is free and large enough; a new one, if none is."""
        free = (slot for slot in slots if self._flags[slot.number] == _FREE)
        found = next((slot for slot in free if slot.size_bytes >= size), None)
        if found is None:
            found = self._new_slot(size)
        else:
            slots.remove(found)
        slots.append(found)  # used in turn: the one free for longest waits least
        return found

    def _new_slot(self, size: int) -> _Slot:
        gpu, stream = self._gpu, self._making
        # Quarters of a power of two: messages that grow do not take a new slot each.
        step = max(_GRANULE, 1 << ((_TENSORS + size).bit_length() - 3))
        total = -(-(_TENSORS + size) // step) * step
        address = gpu.allocate(total)
        for number in (_FILLED, _TAKEN):  # old contents must not be taken for a message's
            gpu.write(stream, address + number, 0)
        stream.synchronize()
        return _Slot(next(self._numbers), address, gpu.export(address), total - _TENSORS)


@dataclass(eq=False)
class _Slot:
    """A slot of this process, to send from."""

    number: int
    address: int
    handle: bytes
    size_bytes: int
    serial: int = 0  # of its last message


def _wait_received(tensors: Sequence[Tensor], copied: torch.cuda.Event) -> None:
    """Make the current stream wait until the tensors are filled; the host goes on."""
    compute = torch.cuda.current_stream(copied.device)
    compute.wait_event(copied)
    for tensor in tensors:
        tensor.record_stream(compute)
