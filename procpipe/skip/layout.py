"""Which skip tensors travel from which partition to which.

Every rank computes the same layout from the model and the balance, so a message between two
partitions only carries the tensors, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from procpipe.skip.namespace import SkipKey
from procpipe.skip.skippable import declared


@dataclass(frozen=True)
class SkipLayout:
    """The skip tensors that cross partitions."""

    #: For each pair of partitions ``(a, b)``, ``a < b``: the skip tensors stashed on ``a`` and
    #: popped on ``b``, in the order in which the model stashes them; and how many layers of ``b``
    #: pop each.
    keys: dict[tuple[int, int], dict[SkipKey, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, partitions: Sequence[dict[str, nn.Module]]) -> SkipLayout:
        """Compute the layout of all partitions of a model whose skip tensors match."""
        made: dict[SkipKey, int] = {}
        counts: dict[tuple[int, int], dict[SkipKey, int]] = {}
        for partition, layers in enumerate(partitions):
            for layer in layers.values():
                stashes, pops = declared(layer)
                for key in stashes:
                    made[key] = partition
                for key in pops:
                    if made[key] != partition:
                        of_pair = counts.setdefault((made[key], partition), {})
                        of_pair[key] = of_pair.get(key, 0) + 1
        return cls(
            {
                pair: {key: counts[pair][key] for key in made if key in counts[pair]}
                for pair in sorted(counts)
            }
        )

    def into(self, partition: int) -> tuple[int, ...]:
        """List the partitions whose skip tensors are popped on this one."""
        return tuple(a for a, b in self.keys if b == partition)

    def out_of(self, partition: int) -> tuple[int, ...]:
        """List the partitions that pop skip tensors made on this one."""
        return tuple(b for a, b in self.keys if a == partition)
