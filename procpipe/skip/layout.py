"""Which skip tensors travel from which partition to which.

Every rank computes the same layout from the model and the balance, so a message between two
partitions only carries the tensors, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from procpipe.skip.skippable import declared
from procpipe.skip.tracker import SkipKey

#: For each pair of partitions ``(a, b)``, ``a < b``: the skip tensors stashed on ``a`` and popped
#: on ``b``, in the order in which the model stashes them; and how many layers of ``b`` pop each.
SkipLayout = Mapping[tuple[int, int], Mapping[SkipKey, int]]


def layout_of(partitions: Sequence[Mapping[str, nn.Module]]) -> SkipLayout:
    """Compute the layout of all partitions of a model whose skip tensors match."""
    made: dict[SkipKey, int] = {}
    counts: dict[tuple[int, int], dict[SkipKey, int]] = {}
    for partition, layers in enumerate(partitions):
        for layer in layers.values():
            stashes, pops = declared(layer)
            made |= dict.fromkeys(stashes, partition)
            for key in pops:
                if made[key] != partition:
                    of_pair = counts.setdefault((made[key], partition), {})
                    of_pair[key] = of_pair.get(key, 0) + 1
    return {
        pair: {key: counts[pair][key] for key in made if key in counts[pair]}
        for pair in sorted(counts)
    }
