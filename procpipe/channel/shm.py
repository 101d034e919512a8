"""CPU tensors through shared memory: within a host.

The sender copies a message's tensors into a slot; the receiver uses them in place:

    sender                                   slot                       receiver
    copies the tensors into a free slot  ──>  in use │ tensors
    token: where it is in the file       ─────────────────────────────>  uses it
                                              free   │  <──────────────  when the last tensor of the
    may use it again                                                     message is freed

Slots are parts of one anonymous file (memfd) of the sender, which each receiver has open, too: it
has no name, takes nothing of ``/dev/shm``, and disappears with the processes that have it open,
however they end. A process maps each file once, as a whole: it is larger than any memory, but only
what is in slots takes some.

A channel has as many slots as it ever had messages in use at a time, each as large as what was
sent through it. A free slot that is too small is moved to the end of the file: its old part becomes
a hole, which takes no memory. Its room there is a power of two, in which it grows without moving.
So all rooms together are at most four times as large as the memory that slots ever took.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from procpipe.channel.meta import Meta, layout, tensors_in

#: A slot begins with a cache line, whose first byte says whether it is in use.
_HEADER_BYTES = 64

#: A note: where the slot is in the sender's file.
_NOTE = struct.Struct("<Q")


@dataclass(eq=False)
class _Slot:
    """A slot of this process, to send from."""

    start: int
    room_bytes: int
    num_bytes: int = 0  # that have memory


class ShmTransport:
    """Shared memory between all ranks of a job on one host.

    ``own_file`` is a descriptor of this rank's file, ``files`` those of the peers'. Who opened them
    gives them their size, and closes them, after ``close``.
    """

    holds_device = False
    inline_bytes = 1 << 13  # larger ones are copied less often through a slot

    def __init__(self, own_file: int, files: Mapping[int, int]) -> None:
        self._own_file = own_file
        self._files = files
        self._memory_of: dict[int, mmap.mmap] = {}  # by descriptor
        self._slots: defaultdict[tuple[int, int], list[_Slot]] = defaultdict(list)
        self._end = 0

    def post_send(self, tensors: list[Tensor], peer: int, channel_id: int) -> tuple[None, bytes]:
        """Copy dense CPU tensors into a slot; ``MemoryError`` if there is no memory left.

        Then the receiver needs the sender no more: it has the file.
        """
        memory = self._mapped(self._own_file)
        offsets, size = layout([tensor.nbytes for tensor in tensors])
        slot = self._free_slot(memory, self._slots[peer, channel_id], _HEADER_BYTES + size)
        memory[slot.start] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + slot.start + _HEADER_BYTES
        for tensor, offset in zip(tensors, offsets, strict=True):
            ctypes.memmove(address + offset, tensor.data_ptr(), tensor.nbytes)
        return None, _NOTE.pack(slot.start)

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Return the tensors of a message, in the memory of its slot."""
        (start,) = _NOTE.unpack(note)
        memory = self._mapped(self._files[peer])
        loan = memoryview(memory)[start + _HEADER_BYTES :]
        weakref.finalize(loan, _free, memory, start, os.getpid()).atexit = False
        return tensors_in(loan, meta), lambda: None  # they are there

    def close(self) -> None:
        """Drop all slots; a tensor that is still in one keeps its memory."""
        self._slots.clear()
        self._memory_of.clear()

    def _mapped(self, file: int) -> mmap.mmap:
        if file not in self._memory_of:
            try:
                memory = mmap.mmap(file, 0)
            except OSError as error:
                raise MemoryError(
                    f"a file of messages cannot be mapped into memory ({error.strerror}): a "
                    "process needs 4 TiB of addresses for each (ulimit -v unlimited)"
                ) from error
            memory.madvise(mmap.MADV_DONTDUMP)  # or a core dump would look at all of it
            self._memory_of[file] = memory
        return self._memory_of[file]

    def _free_slot(self, memory: mmap.mmap, slots: list[_Slot], num_bytes: int) -> _Slot:
        free = [slot for slot in slots if not memory[slot.start]]
        fitting = [slot for slot in free if slot.room_bytes >= num_bytes]
        if fitting:
            slot = fitting[0]
        else:
            for old in free[:1]:
                slots.remove(old)
                with contextlib.suppress(OSError):  # its memory stays if the system refuses
                    memory.madvise(mmap.MADV_REMOVE, old.start, old.room_bytes)
            slot = _Slot(self._end, 1 << (max(num_bytes, mmap.PAGESIZE) - 1).bit_length())
            self._end += slot.room_bytes
            slots.append(slot)
        if slot.num_bytes < num_bytes:
            self._give_memory(slot, num_bytes)
        return slot

    def _give_memory(self, slot: _Slot, num_bytes: int) -> None:
        """Take memory for a slot; else a later write without it would end the process by SIGBUS."""
        try:
            os.posix_fallocate(self._own_file, slot.start, num_bytes)
        except OSError as error:
            raise MemoryError(
                f"there is no shared memory for a message of {num_bytes / 2**20:.1f} MiB "
                f"({error.strerror}): have fewer messages in use at a time (schedule='1f1b', or "
                "smaller mini-batches), or raise the limit of the process or its container"
            ) from error
        slot.num_bytes = num_bytes


def _free(memory: mmap.mmap, start: int, process: int) -> None:
    """Free a slot, all tensors of which are gone."""
    # A forked child has tensors in the slot, too, and its parent may still read them.
    if os.getpid() == process:
        memory[start] = 0
