"""Keeps what must never be destroyed: groups of torch, in a forked child or with a stuck device."""

from __future__ import annotations

import ctypes


def keep_for_ever(value: object) -> None:
    """Never run an object's destructor, not even when the interpreter ends.

    The destructors of torch's groups wait for threads, which a forked child lacks, and for the
    device.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
