"""Gloo's process group, for operations of replicas on their hosts.

A ``Work`` that is dropped cancels its operation and hangs the others; one that lives until the
interpreter ends may abort the process (gloo's loop thread drops the last reference while Python
finalises: "terminate called without an active exception", torch 2.13). ``close`` comes first.

Torch's destructor waits for the operations that are under way, and gloo's connections stay open as
long as anything has a ``Work``, as the traceback of a failure does. Gloo has no ``abort`` (torch
2.13). So ``close`` shuts the connections down: the operations fail at once, on all processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

from procpipe.forks import give_up_in_children, keep_for_ever
from procpipe.torch_internals import gloo_options

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
        give_up_in_children(self)

    def close(self) -> None:
        """Drop the group; operations that are under way fail, here and on the other processes."""
        for descriptor, name in self._sockets:
            with contextlib.suppress(OSError):  # gloo has closed it, as the other side has ended
                _shut_down(descriptor, name)
        self.torchs = None
        self._sockets.clear()

    def give_up_in_child(self) -> None:
        """Close a forked child's copies of the sockets, or peers would not see the parent's end."""
        keep_for_ever(self.torchs)
        for descriptor, _ in self._sockets & _sockets():
            os.close(descriptor)
        self._sockets.clear()


def _shut_down(descriptor: int, name: str) -> None:
    """End a connection, whose descriptor remains gloo's; not the socket that listens."""
    ours = os.dup(descriptor)  # gloo's threads may close theirs, whose number then has a new file
    if os.readlink(f"{_DESCRIPTORS}/{ours}") != name:
        os.close(ours)
        return
    with socket.socket(fileno=ours) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[tuple[int, str]]:
    """Return this process's sockets: descriptor, and what names the socket behind it."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # the one that lists the folder, closed meanwhile
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found
