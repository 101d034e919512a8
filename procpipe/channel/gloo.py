"""CPU tensors through gloo: within a host and across hosts.

Gloo is rendezvous only: a send completes once its receive has been posted, and completion shows
only in ``wait()``. So senders are told by the receiver (``needs_acknowledgement``) when waiting
will not block. Tags keep the channels between two ranks apart, each a FIFO of its own.

A ``Work`` that is dropped cancels its transfer and hangs the peer; one that lives until the
interpreter ends may abort the process (gloo's loop thread drops the last reference while Python
finalises: "terminate called without an active exception", torch 2.13). ``close`` comes first.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo

from procpipe.channel.meta import Meta, allocate

if TYPE_CHECKING:
    from torch.distributed import Store, Work

__all__ = ["GlooTransport"]


class GlooTransport:
    """Gloo between all ranks of a job; building it waits for all of them.

    Args:
        store: a store that all ranks share, with keys of this transport's own.
        rank: this rank.
        num_ranks: the number of ranks.
        timeout_s: how long a transfer may take once both ends are at it.
    """

    needs_acknowledgement = True
    max_posted = sys.maxsize  # a posted receive costs nothing but its buffer

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout_s: float) -> None:
        # Any: torch's stubs leave out a group's send and recv.
        self._group: Any = ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=timeout_s))

    def post_send(self, tensors: list[Tensor], peer: int, kind: int) -> GlooPending:
        """Begin to send contiguous CPU tensors; returns at once."""
        return GlooPending([self._group.send([tensor], peer, kind) for tensor in tensors])

    def post_receive(self, meta: Meta, peer: int, kind: int) -> tuple[list[Tensor], GlooPending]:
        """Allocate the tensors of a message and begin to fill them; returns at once."""
        tensors = allocate(meta, "cpu")
        works = [self._group.recv([tensor], peer, kind) for tensor in tensors]
        return tensors, GlooPending(works)

    def close(self) -> None:
        """Drop the group; nothing may be under way."""
        self._group = None


class GlooPending:
    """Transfers of one message's tensors."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until the tensors may be used or reused."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def is_done(self) -> bool:
        """Return False: gloo does not tell before ``wait``."""
        return False
