"""Skip tensors between partitions: which travel, and how they enter and leave one's layers.

stash ──> popped in this partition   kept for that layer, part of the local graph
      └─> popped in later ones       handed out with the output, a root of the backward pass

pop   <── stashed in this partition
      <── stashed in an earlier one  came in with the input, and catches a gradient like it

Every rank computes the same layout from the model and the balance, so a message between two
partitions only carries the tensors, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from procpipe.skip.skippable import declared
from procpipe.skip.tracker import SkipKey, Tracker

#: For each pair of partitions ``(a, b)``, ``a < b``: the skip tensors stashed on ``a`` and popped
#: on ``b``, in the order in which the model stashes them; and how many layers of ``b`` pop each.
SkipLayout = Mapping[tuple[int, int], Mapping[SkipKey, int]]

#: Sent in place of a skip tensor that was not stashed this time; to pop it is an error.
_ABSENT = "not stashed"


def layout_of(partitions: Sequence[Mapping[str, nn.Module]]) -> SkipLayout:
    """Compute the layout of all partitions of a model whose skip tensors match."""
    made: dict[SkipKey, int] = {}
    counts: dict[tuple[int, int], dict[SkipKey, int]] = {}
    for partition, layers in enumerate(partitions):
        for layer in layers.values():
            stashes, pops = declared(layer)
            made |= {key: partition for key, _ in stashes}
            for key in pops:
                if made[key] != partition:
                    of_pair = counts.setdefault((made[key], partition), {})
                    of_pair[key] = of_pair.get(key, 0) + 1
    return {
        pair: {key: counts[pair][key] for key in made if key in counts[pair]}
        for pair in sorted(counts)
    }


class SkipPorts:
    """Where skip tensors enter and leave a partition.

    Attributes:
        entering: of each partition that some come from, in the order of their messages, which; and
            how many layers here pop each.
        leaving: of each partition that some go to, in that order, which.
    """

    def __init__(self, layout: SkipLayout, partition: int) -> None:
        self.entering = [keys for (_, b), keys in layout.items() if b == partition]
        self.leaving = [keys for (a, _), keys in layout.items() if a == partition]

    def tracker(self, messages: Iterable[Sequence[Any]]) -> Tracker:
        """Make the tracker of one run of the layers, from the values of each source's message."""
        tracker = Tracker()
        for keys, values in zip(self.entering, messages, strict=True):
            for (key, num_pops), value in zip(keys.items(), values, strict=True):
                if not isinstance(value, str):
                    tracker.stash(key, value, num_pops)
        return tracker

    def messages(self, tracker: Tracker) -> list[tuple[Any, ...]]:
        """Return the value of each destination's message once the layers have run.

        What other partitions will pop is what the layers here have left.
        """
        return [tuple(tracker.left(key, _ABSENT) for key in keys) for keys in self.leaving]
