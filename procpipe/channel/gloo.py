"""CPU tensors through gloo: within a host and across hosts.

Gloo is rendezvous only: a send completes once its receive has been posted, and completion shows
only in ``wait()``. So the receiver acknowledges each message (``needs_acknowledgement``): after
that, waiting does not block. Tags keep the channels between two ranks apart, each a FIFO.

A ``Work`` that is dropped cancels its transfer and hangs the peer; one that lives until the
interpreter ends may abort the process (gloo's loop thread drops the last reference while Python
finalises: "terminate called without an active exception", torch 2.13). ``close`` comes first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from procpipe.channel.link import INLINE_BYTES
from procpipe.channel.meta import Meta, allocate
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
        """Drop the group; nothing may be under way."""
        self.torchs = None
        self._sockets.clear()

    def give_up_in_child(self) -> None:
        """Close a forked child's copies of the sockets, or peers would not see the parent's end."""
        keep_for_ever(self.torchs)
        for descriptor, _ in self._sockets & _sockets():
            os.close(descriptor)
        self._sockets.clear()


class GlooTransport(GlooGroup):
    """Gloo between all ranks of a job; the constructor waits for all of them."""

    needs_acknowledgement = True
    blocks = True
    holds_device = False
    copies_at_once = False
    inline_bytes = INLINE_BYTES
    max_posted = sys.maxsize  # a posted receive costs nothing but its buffer

    def post_send(
        self, tensors: list[Tensor], peer: int, channel_id: int
    ) -> tuple[GlooTransfer, bytes]:
        """Begin to send contiguous CPU tensors; returns at once."""
        works = [self.torchs.send([tensor], peer, channel_id) for tensor in tensors]
        return GlooTransfer(works), b""

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Allocate the tensors of a message and begin to fill them; returns at once."""
        tensors = allocate(meta, "cpu")
        works = [self.torchs.recv([tensor], peer, channel_id) for tensor in tensors]
        return tensors, GlooTransfer(works).wait

    def drain(self) -> None:
        """Do nothing: every receive was waited for, and every send acknowledged."""


def _sockets() -> set[tuple[int, str]]:
    """Return this process's sockets: descriptor, and what names the socket behind it."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # the one that lists the folder, closed meanwhile
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found


class GlooTransfer:
    """The transfer of one message's tensors."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until the tensors may be used or reused."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def is_done(self) -> bool:
        """Return False: gloo shows it only in ``wait``."""
        return False
