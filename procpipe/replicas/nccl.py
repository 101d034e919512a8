"""The processes that run the same stage, each on a GPU of its own, connected by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from procpipe.channel.nccl import Communicators, new_group

if TYPE_CHECKING:
    from torch.distributed import Store, Work

#: Thread blocks that an operation may take. The pipeline's transfers run beside it.
_MAX_BLOCKS = 8


class NcclGroup(Communicators):
    """One communicator; its operations begin after what is queued on the current stream.

    Args:
        ranks: those of the group, by replica.
        rank: this process's.
        device: its GPU.
    """

    def __init__(self, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._key = (*ranks, 0)
        self._ranks = ranks

    def connect(self, store: Store) -> None:
        """Connect to the other processes of the group; blocks until they do the same."""
        place = self._ranks.index(self._rank), len(self._ranks)
        try:
            self._connect(
                self._key,
                lambda: new_group(store, "group", place, _MAX_BLOCKS, is_high_priority=True),
                lambda group, token: group.allreduce([token]),
            )
        finally:
            self._end_connecting()

    def begin(self, operate: Callable[[Any], Work]) -> Work:
        """Begin an operation of torch's process group; the host never waits for it."""
        work = operate(self._groups[self._key])
        self._note(self._key, work)
        return work


class Queued:
    """An operation that is queued on the device; its tensors are held until it is waited for."""

    def __init__(self, work: Work, *tensors: Tensor) -> None:
        self._work = work
        self._tensors = tensors

    def wait(self) -> None:
        """Make the current stream wait for the result; the host goes on."""
        self._work.block_current_stream()
