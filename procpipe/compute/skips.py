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
        #: Skip tensors popped here of which a later partition has a copy of its own.
        self._needed_later = {
            key: b
            for (a, b), keys in layout.items()
            for key in keys
            if b > partition and a in self.sources and key in layout[a, partition]
        }

    def tracker(self, messages: Iterable[Sequence[Any]]) -> StageTracker:
        """Make the tracker of one run of the layers, from the values of each source's message."""
        tracker = StageTracker(self._num_pops_elsewhere)
        for keys, values in zip(self._entering, messages, strict=True):
            for (key, num_pops), value in zip(keys.items(), values, strict=True):
                if not isinstance(value, str):
                    tracker.enter(key, value, num_pops, is_needed_later=key in self._needed_later)
        return tracker

    def messages(self, tracker: StageTracker) -> list[tuple[Any, ...]]:
        """Return the value of each destination's message once the layers have run."""
        return [tuple(tracker.leaving.get(key, _ABSENT) for key in keys) for keys in self._leaving]

    def check(self, tracker: StageTracker) -> None:
        """Check, once the layers have run, that they did not change what later partitions need.

        Raises:
            RuntimeError: a skip tensor that a later one pops too was changed in place.
        """
        for key, (tensor, version) in tracker.needed_later.items():
            if tensor._version != version:
                raise RuntimeError(
                    f"skip tensor {key} was changed in place by a layer that popped it, but "
                    f"partition {self._needed_later[key]} pops it too, and has it as it was: "
                    "change a copy (skip = skip + 1 for skip.add_(1))"
                )


class StageTracker(Tracker):
    """A tracker that also holds what comes from, and goes to, other partitions.

    Attributes:
        leaving: what later partitions will pop.
        needed_later: what later partitions pop too, and its version when it entered.
    """

    def __init__(self, num_pops_elsewhere: Counter[SkipKey]) -> None:
        super().__init__()
        self.leaving: dict[SkipKey, Tensor | None] = {}
        self._num_pops_elsewhere = num_pops_elsewhere
        self.needed_later: dict[SkipKey, tuple[Tensor, int]] = {}

    def enter(
        self, key: SkipKey, tensor: Tensor | None, num_pops: int, *, is_needed_later: bool
    ) -> None:
        """Keep a tensor that came from an earlier partition for the layers that will pop it."""
        super().stash(key, tensor, num_pops)
        if is_needed_later and tensor is not None and not tensor.is_inference():
            self.needed_later[key] = tensor, tensor._version

    def stash(self, key: SkipKey, tensor: Tensor | None, num_pops: int) -> None:
        """Keep a tensor for the layers of this partition that will pop it, and for later ones."""
        num_elsewhere = self._num_pops_elsewhere[key]
        if num_elsewhere:
            self.leaving[key] = tensor
        if num_pops > num_elsewhere:
            super().stash(key, tensor, num_pops - num_elsewhere)
