"""The skip tensors of one micro-batch in one partition, while its layers run.

stash ──> popped in this partition   kept here, part of the local graph
      └─> popped in later ones       handed out with the output, a root of the backward pass

pop   <── stashed in this partition
      <── stashed in an earlier one  came in with the input, and catches a gradient like it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from procpipe.skip.layout import SkipLayout
from procpipe.skip.tracker import SkipKey, Tracker

#: Sent in place of a skip tensor that was not stashed this time; to pop it is an error.
_ABSENT = "not stashed"


class SkipPorts:
    """Where skip tensors enter and leave a partition.

    Attributes:
        sources: the partitions that skip tensors come from, in the order of their messages.
        destinations: the partitions that they go to, in the order of their messages.
    """

    def __init__(self, layout: SkipLayout, partition: int) -> None:
        self.sources = tuple(a for a, b in layout if b == partition)
        self.destinations = tuple(b for a, b in layout if a == partition)
        self._entering = [layout[a, partition] for a in self.sources]
        self._leaving = [layout[partition, b] for b in self.destinations]
        self._num_pops_elsewhere: Counter[SkipKey] = Counter()
        for num_pops in self._leaving:
            self._num_pops_elsewhere.update(num_pops)

    def tracker(self, messages: Iterable[Sequence[Any]]) -> PartitionTracker:
        """Make the tracker of one run of the layers, from the values of each source's message."""
        tracker = PartitionTracker(self._num_pops_elsewhere)
        for keys, values in zip(self._entering, messages, strict=True):
            for (key, num_pops), value in zip(keys.items(), values, strict=True):
                if not isinstance(value, str):
                    tracker.stash(key, value, num_pops)
        return tracker

    def messages(self, tracker: PartitionTracker) -> list[tuple[Any, ...]]:
        """Return the value of each destination's message once the layers have run."""
        return [tuple(tracker.leaving.get(key, _ABSENT) for key in keys) for keys in self._leaving]


class PartitionTracker(Tracker):
    """A tracker that also holds what later partitions will pop, in ``leaving``."""

    def __init__(self, num_pops_elsewhere: Counter[SkipKey]) -> None:
        super().__init__()
        self.leaving: dict[SkipKey, Tensor | None] = {}
        self._num_pops_elsewhere = num_pops_elsewhere

    def stash(self, key: SkipKey, tensor: Tensor | None, num_pops: int) -> None:
        """Keep a tensor for the layers of this partition that will pop it, and for later ones."""
        num_elsewhere = self._num_pops_elsewhere[key]
        if num_elsewhere:
            self.leaving[key] = tensor
        if num_pops > num_elsewhere:
            super().stash(key, tensor, num_pops - num_elsewhere)
