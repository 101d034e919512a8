"""Parts of a file in memory, without a descriptor each: Python's ``mmap`` keeps one a mapping.

Python 3.13 can do without (``trackfd``); older ones are given the system's own call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, start: int, num_bytes: int) -> memoryview:
    """Map a part of a file into memory, shared with all who map it; writable.

    Args:
        descriptor: of the open file; may be closed afterwards.
        start: where the part begins, a multiple of the page's size.
        num_bytes: how long it is.

    Returns:
        Its bytes. It is unmapped once nothing refers to them: no slice, no tensor over them.

    Raises:
        OSError: the system refuses.
    """
    system = _system()
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = system.mmap(None, num_bytes, protection, flags, descriptor, start)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * num_bytes).from_address(address)
    # Not as Python ends: what runs last may still use it, and the process takes it along.
    weakref.finalize(memory, system.munmap, address, num_bytes).atexit = False
    return memoryview(memory).cast("B")


def discard(memory: memoryview) -> None:
    """Give the memory behind a mapping back to the system; for all who map it, it is zeros then."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _system().madvise(address, len(memory), mmap.MADV_REMOVE)  # where it is refused it stays


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
