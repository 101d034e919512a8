"""Releases, in a forked child, what it inherits of its parent's job, before other Python runs.

A child of ``os.fork``, for instance a worker of a DataLoader, begins with a copy of every object of
its parent. But sockets, shared memory and the launcher's store are not copied: what the child does
with them affects the parent, and while it has the sockets open, peers cannot detect the parent's
end. So objects that hold such a resource release it in each child:

    parent    give_up_in_children(mesh)
    child     mesh.give_up_in_child()        closes its copies; later calls raise an error

A child that native code forks runs no Python, so this does not apply to it; then the parent's end
is detected in other ways (``channel/connection.py``).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import traceback
import weakref
from typing import Protocol


class Holder(Protocol):
    """Holds a resource that a forked child must not use."""

    def give_up_in_child(self) -> None:
        """Close descriptors; write to nothing that is shared, and wait for no thread."""


#: Objects to give up in the next child of this process.
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def give_up_in_children(holder: Holder) -> None:
    """Call an object's ``give_up_in_child`` in forked children, for as long as it lives."""
    _register()
    _holders.add(holder)


def keep_for_ever(value: object) -> None:
    """Never run an object's destructor, not even when the interpreter ends.

    The destructors of torch's groups and stores wait for threads, which a forked child lacks.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_give_up_all)


def _give_up_all() -> None:
    holders = tuple(_holders)
    _holders.clear()
    for holder in holders:
        try:
            holder.give_up_in_child()
        except Exception:  # the others must still be given up
            traceback.print_exc(file=sys.stderr)
