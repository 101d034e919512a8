"""Gloo's process group, for operations of replicas on their hosts.

A ``Work`` that is dropped cancels its operation and hangs the others; one that lives until the
interpreter ends may abort the process (gloo's loop thread drops the last reference while Python
finalises: "terminate called without an active exception", torch 2.13). ``close`` comes first.

Torch's destructor waits for what is under way: for all of the timeout, where other processes have
failed. Gloo has no ``abort`` (torch 2.13), and it may lose an operation whose connection ends. So a
group with an operation under way is never destroyed, nor are its latest operations.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroupGloo, Store

from procpipe.forks import give_up_in_children, keep_for_ever
from procpipe.torch_internals import gloo_options

if TYPE_CHECKING:
    from torch.distributed import Work

_DESCRIPTORS = "/proc/self/fd"


class GlooGroup:
    """A process group of gloo; the constructor waits for all of its processes.

    ``host`` is the local address on which gloo listens. Its default, that of the host's name, may
    be a network address when all ranks are on this host, and a loopback one (127.0.1.1 on Debian)
    when they are not. The store's keys are this group's own.

    Attributes:
        torchs: torch's object; None once the group is closed.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, timeout_s: float, host: str
    ) -> None:
        # Any: torch's stubs leave out a group's send and recv, and all of its options.
        gloo: Any = ProcessGroupGloo
        # The user's choice counts; torch's default device would ignore it here.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        where = {"interface": interface} if interface else {"hostname": host}
        options = gloo_options(gloo, timeout_s, gloo.create_device(**where))
        before = _sockets()
        self.torchs: Any = gloo(store, rank, num_ranks, options)
        self._sockets = _sockets() - before
        self._works: list[Work] = []
        give_up_in_children(self)

    def begin(self, operate: Callable[[Any], Work]) -> Work:
        """Begin an operation of torch's group; ``end`` is to wait for it."""
        work = operate(self.torchs)
        self._works.append(work)
        return work

    def end(self, work: Work) -> None:
        """Wait for an operation, which is kept until another one is over."""
        work.wait()
        self._works = [one for one in self._works if one is work or not one.is_completed()]

    def close(self) -> None:
        """Drop the group, without waiting for what is under way."""
        if not all(work.is_completed() for work in self._works):
            keep_for_ever((self.torchs, self._works))
        self.torchs = None
        self._works = []
        self._sockets.clear()

    def give_up_in_child(self) -> None:
        """Close a forked child's copies of the sockets, or peers would not see the parent's end."""
        keep_for_ever(self.torchs)
        for descriptor, _ in self._sockets & _sockets():
            os.close(descriptor)
        self._sockets.clear()


def _sockets() -> set[tuple[int, str]]:
    """Return this process's sockets: descriptor, and what names the socket behind it."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # the one that lists the folder, closed meanwhile
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found
