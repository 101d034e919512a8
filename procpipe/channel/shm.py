"""CPU tensors through shared memory: within a host.

A message's tensors are copied once, by the sender into a slot; the receiver uses them in place:

    sender                                   slot                       receiver
    copies the tensors into a free slot  ──>  in use │ tensors
    token: its number and descriptor     ─────────────────────────────>  maps it, once for each slot
                                              free   │  <──────────────  when the last tensor of the
    may use it again                                                     message is let go

A slot is an anonymous file (memfd) of the sender, which the receiver opens through ``/proc``: it
has no name, takes nothing of ``/dev/shm``, and is gone with the processes that have it open,
however they end. A channel has as many slots as it ever had messages in use at a time, each as
large as what was sent through it; one that has become too small is dropped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from procpipe.channel.meta import Meta
from procpipe.forks import give_up_in_children

__all__ = ["ShmTransport"]

_NAME = "procpipe-slot"

#: What a token says of a slot: number, descriptor in the sender, number of the slots dropped since
#: the token before; their numbers follow.
_NOTE = struct.Struct("<QIH")
_NUMBER = struct.Struct("<Q")
_MAX_DROPPED = 1000

#: A slot begins with a line of its own: a byte each for "in use" and "mapped by the receiver".
_HEADER_BYTES = 64
_IN_USE, _IS_MAPPED = 0, 1

#: Tensors begin at multiples of this, as torch's own memory does.
_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE


class ShmTransport:
    """Shared memory between all ranks of a job, which are on one host.

    Args:
        pids: the process of each peer.
    """

    needs_acknowledgement = False
    blocks = False
    copies_at_once = True
    max_posted = sys.maxsize
    inline_bytes = 1 << 13  # larger ones are copied less often through a slot

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self._slots: dict[tuple[int, int], list[_Slot]] = {}
        self._dropped: dict[tuple[int, int], list[int]] = {}
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        self._num_slots = 0
        give_up_in_children(self)

    def post_send(self, tensors: list[Tensor], peer: int, kind: int) -> tuple[_Sent, bytes]:
        """Copy contiguous CPU tensors into a slot.

        Raises:
            MemoryError: the host has no memory for a slot.
        """
        offsets, size = _layout([t.numel() * t.element_size() for t in tensors])
        slot = self._free_slot(peer, kind, size)
        slot.header[_IN_USE] = 1
        for tensor, offset in zip(tensors, offsets, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            ctypes.memmove(slot.address + offset, tensor.data_ptr(), num_bytes)
        dropped = self._dropped.get((peer, kind), [])
        note = _NOTE.pack(slot.number, slot.descriptor, len(dropped))
        if dropped:
            note += b"".join(map(_NUMBER.pack, dropped))
            dropped.clear()
        return _Sent(slot), note

    def post_receive(
        self, meta: Meta, peer: int, kind: int, note: bytes
    ) -> tuple[list[Tensor], _Received]:
        """Return the tensors of a message, in the memory of its slot."""
        number, descriptor, num_dropped = _NOTE.unpack_from(note)
        for k in range(num_dropped):
            (dropped,) = _NUMBER.unpack_from(note, _NOTE.size + k * _NUMBER.size)
            self._mapped.pop((peer, dropped), None)
        slot = self._mapped.get((peer, number))
        if slot is None:
            slot = self._mapped[peer, number] = _Mapped(self._pids[peer], descriptor)
        return slot.lend(meta), _Received()

    def drain(self) -> None:
        """Return: nothing is under way on a device."""

    def close(self) -> None:
        """Let go of all slots; tensors that still are in one keep its memory."""
        self._slots.clear()
        self._mapped.clear()

    def give_up_in_child(self) -> None:
        """Let a forked child free no slot: its parent may still read what the child lets go of."""
        for mapped in self._mapped.values():
            mapped.never_take_back()
        self.close()

    def _free_slot(self, peer: int, kind: int, size: int) -> _Slot:
        """Return a slot that nobody uses, and that is large enough."""
        slots = self._slots.setdefault((peer, kind), [])
        for slot in slots:
            if slot.size_bytes >= size and not slot.header[_IN_USE]:
                return slot
        dropped = self._dropped.setdefault((peer, kind), [])
        for slot in [slot for slot in slots if not slot.header[_IN_USE]]:
            if len(dropped) < _MAX_DROPPED:  # it is too small
                slots.remove(slot)
                dropped.append(slot.number)
        slot = _Slot(self._num_slots, size)
        self._num_slots += 1
        slots.append(slot)
        return slot


class _Slot:
    """A slot of this process, to send from."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = -(-size_bytes // _PAGE) * _PAGE
        self.descriptor = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self.descriptor)
        total = _HEADER_BYTES + self.size_bytes
        try:
            os.posix_fallocate(self.descriptor, 0, total)  # not found missing by a SIGBUS later
            page = mmap.mmap(self.descriptor, total)
        except OSError as error:
            raise MemoryError(
                f"there is no shared memory for a message of {size_bytes / 2**20:.1f} MiB "
                f"({error.strerror}): give smaller micro-batches (chunks), raise the limit of the "
                "process or its container, or use Stage(transport='gloo')"
            ) from error
        self.header = memoryview(page)[:_HEADER_BYTES]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(page)) + _HEADER_BYTES


class _Mapped:
    """A slot of another process, to receive from."""

    def __init__(self, pid: int, descriptor: int) -> None:
        ours = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            self._memory = memoryview(mmap.mmap(ours, os.fstat(ours).st_size))
        finally:
            os.close(ours)
        self._memory[_IS_MAPPED] = 1
        self._lent: weakref.ref[memoryview] | None = None

    def lend(self, meta: Meta) -> list[Tensor]:
        """Return tensors in the slot's memory; it is free when all of them are gone."""
        sizes = [tensor.num_bytes for tensor in meta.tensors]
        offsets, size = _layout(sizes)
        loan = self._memory[_HEADER_BYTES : _HEADER_BYTES + size]
        self._lent = weakref.ref(loan, self._take_back)
        # Ordinary tensors also in inference mode: see ``meta.allocate``.
        with torch.inference_mode(False):
            return [
                torch.frombuffer(
                    loan,
                    dtype=tensor.dtype,
                    count=num_bytes // tensor.dtype.itemsize,
                    offset=offset,
                ).view(tensor.shape)
                if num_bytes
                else torch.empty(tensor.shape, dtype=tensor.dtype)
                for tensor, num_bytes, offset in zip(meta.tensors, sizes, offsets, strict=True)
            ]

    def never_take_back(self) -> None:
        """Leave the slot in use, whatever becomes of the tensors."""
        self._lent = None

    def _take_back(self, lent: object) -> None:
        self._memory[_IN_USE] = 0


class _Sent:
    """A message that is in its slot."""

    def __init__(self, slot: _Slot) -> None:
        self._slot = slot

    def wait(self) -> None:
        """Return: the tensors were copied."""

    def is_done(self) -> bool:
        """Tell whether the receiver has mapped the slot, and can do without the sender."""
        return bool(self._slot.header[_IS_MAPPED])


class _Received:
    """A message that can be used."""

    def wait(self) -> None:
        """Return: the tensors are there."""

    def is_done(self) -> bool:
        """Return True."""
        return True


def _layout(sizes: list[int]) -> tuple[list[int], int]:
    """Return where each of some tensors begins, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end
