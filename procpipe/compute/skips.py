"""The skip tensors of one micro-batch on one stage, while its layers run.

stash ──> popped on this stage       kept here, part of the local graph
      └─> popped on later stages     handed out with the output, a root of the backward pass

pop   <── stashed on this stage
      <── stashed on an earlier one  came in with the input, and catches a gradient like it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from procpipe.skip.layout import SkipLayout
from procpipe.skip.namespace import SkipKey
from procpipe.skip.tracker import PlainTracker

__all__ = ["SkipPorts", "StageTracker"]


class SkipPorts:
    """Where skip tensors enter and leave a stage.

    Args:
        layout: the model's.
        stage: this stage.

    Attributes:
        sources: the stages that skip tensors come from, in the order of their messages.
        destinations: the stages that skip tensors go to, in the order of their messages.
    """

    def __init__(self, layout: SkipLayout, stage: int) -> None:
        self.sources = layout.into(stage)
        self.destinations = layout.out_of(stage)
        self._entering = [layout.keys[a, stage] for a in self.sources]
        self._leaving = [layout.keys[stage, b] for b in self.destinations]
        self._num_pops_elsewhere: dict[SkipKey, int] = {}
        for b in self.destinations:
            pair = stage, b
            for key, num_pops in zip(layout.keys[pair], layout.num_pops[pair], strict=True):
                known = self._num_pops_elsewhere.get(key, 0)
                self._num_pops_elsewhere[key] = known + num_pops

    def tracker(self, messages: Iterable[Sequence[Any]]) -> StageTracker:
        """Make the tracker of one run of the layers, from the values of each source's message."""
        entered = {
            key: tensor
            for keys, tensors in zip(self._entering, messages, strict=True)
            for key, tensor in zip(keys, tensors, strict=True)
        }
        return StageTracker(entered, self._num_pops_elsewhere)

    def messages(self, tracker: StageTracker) -> list[tuple[Tensor | None, ...]]:
        """Return the value of each destination's message once the layers have run."""
        return [tuple(tracker.leaving[key] for key in keys) for keys in self._leaving]


class StageTracker:
    """A tracker that knows what came from, and goes to, other stages."""

    def __init__(
        self, entered: dict[SkipKey, Tensor | None], num_pops_elsewhere: dict[SkipKey, int]
    ) -> None:
        self.leaving: dict[SkipKey, Tensor | None] = {}
        self._entered = entered
        self._num_pops_elsewhere = num_pops_elsewhere
        self._local = PlainTracker()

    def stash(self, key: SkipKey, tensor: Tensor | None, num_pops: int) -> None:
        """Keep a tensor for the layers of this stage that will pop it, and hand it out."""
        num_elsewhere = self._num_pops_elsewhere.get(key, 0)
        if num_elsewhere:
            self.leaving[key] = tensor
        if num_pops > num_elsewhere:
            self._local.stash(key, tensor, num_pops - num_elsewhere)

    def pop(self, key: SkipKey) -> Tensor | None:
        """Give a tensor that came from an earlier stage or layer."""
        if key in self._entered:
            return self._entered[key]
        return self._local.pop(key)
