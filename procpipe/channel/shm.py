"""CPU tensors through shared memory: within a host.

The sender copies a message's tensors into a slot; the receiver uses them in place:

    sender                                   slot                       receiver
    copies the tensors into a free slot  ──>  in use │ tensors
    token: where it is in the file       ─────────────────────────────>  maps it, once for each slot
                                              free   │  <──────────────  when the last tensor of the
    may use it again                                                     message is freed

Slots are parts of one anonymous file (memfd) of the sender, which each receiver has open, too: it
has no name, takes nothing of ``/dev/shm``, and disappears with the processes that have it open,
however they end. So a rank needs one descriptor for its own file and one for that of each rank it
receives from, whatever the number of slots.

A channel has as many slots as it ever had messages in use at a time, each as large as what was
sent through it. A slot that has become too small is dropped: its part of the file becomes a hole,
which takes no memory, and the next slot is made at the end of the file.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from procpipe.channel.meta import Meta, layout, tensors_in

#: A slot begins with a cache line for the byte "in use".
_HEADER_BYTES = 64
_IN_USE = 0

_PAGE = mmap.PAGESIZE

_FAILED = ctypes.c_void_p(-1).value


class ShmTransport:
    """Shared memory between all ranks of a job on one host.

    ``own_file`` is a descriptor of this rank's file, ``files`` those of the peers'. Who opened them
    closes them, after ``close``.
    """

    holds_device = False
    inline_bytes = 1 << 13  # larger ones are copied less often through a slot

    def __init__(self, own_file: int, files: Mapping[int, int]) -> None:
        self._own_file = own_file
        self._files = files
        self._end = 0
        self._slots: dict[tuple[int, int], list[_ShmSlot]] = {}
        self._dropped: dict[tuple[int, int], list[int]] = {}
        self._mapped: dict[tuple[int, int], _Mapped] = {}

    def post_send(self, tensors: list[Tensor], peer: int, channel_id: int) -> tuple[None, bytes]:
        """Copy dense CPU tensors into a slot; ``MemoryError`` if there is no memory left.

        Then the receiver needs the sender no more: it has the file.
        """
        offsets, size = layout([tensor.nbytes for tensor in tensors])
        slot = self._free_slot(peer, channel_id, size)
        slot.memory[_IN_USE] = 1
        address = slot.address + _HEADER_BYTES
        for tensor, offset in zip(tensors, offsets, strict=True):
            ctypes.memmove(address + offset, tensor.data_ptr(), tensor.nbytes)
        # Where the slot is, its size, and where those are that were dropped since the note before.
        dropped = self._dropped.pop((peer, channel_id), ())
        return None, array("Q", (slot.start, slot.num_bytes, *dropped)).tobytes()

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Return the tensors of a message, in the memory of its slot."""
        start, num_bytes, *dropped = memoryview(note).cast("Q")
        for each in dropped:
            self._mapped.pop((peer, each), None)
        slot = self._mapped.get((peer, start))
        if slot is None:
            slot = self._mapped[peer, start] = _Mapped(self._files[peer], start, num_bytes)
        return slot.lend(meta), lambda: None  # they are there

    def drain(self) -> None:
        """Do nothing: no transfer is under way on a device."""

    def close(self) -> None:
        """Drop all slots; a tensor that is still in one keeps its memory."""
        self._slots.clear()
        self._mapped.clear()

    def _free_slot(self, peer: int, channel_id: int, size: int) -> _ShmSlot:
        slots = self._slots.setdefault((peer, channel_id), [])
        for slot in slots:
            if slot.size_bytes >= size and not slot.memory[_IN_USE]:
                return slot
        too_small = [slot for slot in slots if not slot.memory[_IN_USE]]
        for slot in too_small:
            slots.remove(slot)
            slot.discard()
        self._dropped.setdefault((peer, channel_id), []).extend(slot.start for slot in too_small)
        slot = _ShmSlot(self._own_file, self._end, size)
        self._end += slot.num_bytes
        slots.append(slot)
        return slot


class _ShmSlot:
    """A slot of this process, to send from."""

    def __init__(self, file: int, start: int, size_bytes: int) -> None:
        self.start = start
        self.num_bytes = -(-(_HEADER_BYTES + size_bytes) // _PAGE) * _PAGE
        self.size_bytes = self.num_bytes - _HEADER_BYTES
        try:  # else a later write without memory would end the process by SIGBUS
            os.posix_fallocate(file, start, self.num_bytes)
        except OSError as error:
            raise MemoryError(
                f"there is no shared memory for a message of {size_bytes / 2**20:.1f} MiB "
                f"({error.strerror}): have fewer messages in use at a time (schedule='1f1b', or "
                "smaller mini-batches), or raise the limit of the process or its container"
            ) from error
        self.memory = _mapped(file, start, self.num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def discard(self) -> None:
        """Return the memory of an unused slot to the system; it stays if the system refuses."""
        _system().madvise(self.address, len(self.memory), mmap.MADV_REMOVE)


class _Mapped:
    """A slot of another process, to receive from."""

    def __init__(self, file: int, start: int, num_bytes: int) -> None:
        self._memory = _mapped(file, start, num_bytes)
        self._process = os.getpid()
        self._lent: weakref.ref[memoryview] | None = None

    def lend(self, meta: Meta) -> list[Tensor]:
        """Return tensors in the slot's memory; it is free when all of them are gone."""
        loan = self._memory[_HEADER_BYTES:]
        self._lent = weakref.ref(loan, self._take_back)
        return tensors_in(loan, meta)

    def _take_back(self, lent: object) -> None:
        # A forked child has tensors in the slot, too, and its parent may still read them.
        if os.getpid() == self._process:
            self._memory[_IN_USE] = 0


def _mapped(file: int, start: int, num_bytes: int) -> memoryview:
    """Map a slot into shared, writable memory; ``start`` is a multiple of the page size.

    Python's ``mmap`` would keep a descriptor for each (3.13 can do without: ``trackfd``), so this
    calls the system's. The memory is unmapped once nothing refers to its bytes: no slice, no tensor
    over them.
    """
    system = _system()
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = system.mmap(None, num_bytes, protection, flags, file, start)
    if address == _FAILED:
        raise MemoryError(
            f"a message of {num_bytes / 2**20:.1f} MiB cannot be mapped into memory "
            f"({os.strerror(ctypes.get_errno())}): the process has too many messages in use at a "
            "time (vm.max_map_count), or an address space that is limited (ulimit -v): give fewer "
            "micro-batches (chunks), or use Stage(schedule='1f1b')"
        )
    memory = (ctypes.c_char * num_bytes).from_address(address)
    # Not as Python ends: other exit functions may still use it, and the process frees it anyway.
    weakref.finalize(memory, system.munmap, address, num_bytes).atexit = False
    return memoryview(memory).cast("B")


@functools.cache
def _system() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = pointer
    # off_t has 64 bits wherever a pointer has.
    library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_ssize_t)
    library.munmap.argtypes = (pointer, size)
    library.madvise.argtypes = (pointer, size, number)
    return library
