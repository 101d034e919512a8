"""Releases, in a forked child, the sockets that it inherits of its parent's job.

A child of ``os.fork``, for instance a worker of a DataLoader, has copies of the parent's sockets.
While it has them open, peers cannot detect the parent's end. All else that a child must not do
is prevented by a check of the process's number where it would be done.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol


class Holder(Protocol):
    """Holds sockets that a forked child must not keep."""

    def give_up_in_child(self) -> None:
        """Close them; wait for no thread."""


#: Objects to give up in the next child of this process.
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def give_up_in_children(holder: Holder) -> None:
    """Call an object's ``give_up_in_child`` in forked children, for as long as it lives."""
    _holders.add(holder)


def keep_for_ever(value: object) -> None:
    """Never run an object's destructor, not even when the interpreter ends.

    The destructors of torch's groups wait for threads, which a forked child lacks, and for the
    device.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _give_up_all() -> None:
    for holder in tuple(_holders):
        holder.give_up_in_child()


os.register_at_fork(after_in_child=_give_up_all)
