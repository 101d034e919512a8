"""Maps parts of a file into memory without keeping a descriptor for each.

Python's ``mmap`` duplicates the descriptor for every mapping (3.13 can do without: ``trackfd``). So
this calls the system's ``mmap``.
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
    """Map a part of a file into shared, writable memory; it begins at a multiple of the page size.

    The descriptor may be closed afterwards. The memory is unmapped once nothing refers to its
    bytes: no slice, no tensor over them. Raises ``OSError`` if the system refuses.
    """
    system = _system()
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = system.mmap(None, num_bytes, protection, flags, descriptor, start)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * num_bytes).from_address(address)
    # Not as Python ends: other exit functions may still use it, and the process frees it anyway.
    weakref.finalize(memory, system.munmap, address, num_bytes).atexit = False
    return memoryview(memory).cast("B")


def discard(memory: memoryview) -> None:
    """Return a mapping's memory to the system; every process that maps it then reads zeros."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _system().madvise(address, len(memory), mmap.MADV_REMOVE)  # no error: then it stays


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
