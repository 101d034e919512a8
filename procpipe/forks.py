"""What a forked child has of its parent's job, and gives up before any other Python of it runs.

A child of ``os.fork``, a worker of a DataLoader for instance, begins with a copy of every object of
its parent. But sockets, shared memory and the launcher's store behind them are not copied: what the
child does with them happens to the parent, and while it has the sockets open, nobody sees that the
parent has died. So what holds such a thing gives it up in each child:

    parent    give_up_in_children(mesh)
    child     mesh.give_up_in_child()        closes its copies; later calls raise an error

A child that native code forks runs no Python and does nothing here; that its parent has died is
seen by other means (``channel/mesh.py``).
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
    """Holds what a forked child must not use."""

    def give_up_in_child(self) -> None:
        """Give it up: close descriptors, write to nothing that is shared, wait for no thread."""


#: What gives something up in the next child of this process.
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def give_up_in_children(holder: Holder) -> None:
    """Have an object, as long as it lives, give up in forked children what they must not use."""
    _register()
    _holders.add(holder)


def keep_for_ever(value: object) -> None:
    """Keep an object that a forked child has no use for, even when the interpreter ends.

    The destructors of torch's groups and stores wait for threads, which a child does not have.
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
        except Exception:  # the others must not stay
            traceback.print_exc(file=sys.stderr)
