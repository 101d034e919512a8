"""Parameters and buffers that layers of several partitions use.

    embedding ─ block ─ block ─ output layer       balance [2, 2]
        └──────── one weight ────────┘             tied between partitions 0 and 1

Partitions of one process use the tensor itself; each other process has a copy. Independent of
processes: every rank finds the same ties, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn


@dataclass(frozen=True)
class Tie:
    """A parameter or buffer that several layers use, most often of several partitions."""

    #: Its first name in each partition that uses it, by partition; names are those in the full
    #: model.
    names: dict[int, str]
    all_names: tuple[str, ...]  # all its names in the full model, in order
    is_parameter: bool  # whether it is a parameter

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that use it, ascending."""
        return tuple(self.names)

    def __str__(self) -> str:
        users = [f"{name} in partition {j}" for j, name in self.names.items()]
        return f"{', '.join(users[:-1])} and {users[-1]}"


def find_ties(parts: Sequence[Mapping[str, nn.Module]]) -> list[Tie]:
    """Find all that several layers use, in the order of first names in the model."""
    found: dict[Tensor, tuple[dict[int, str], list[str]]] = {}
    for j, layers in enumerate(parts):
        for prefix, layer in layers.items():
            parameters = layer.named_parameters(prefix, remove_duplicate=False)
            buffers = layer.named_buffers(prefix, remove_duplicate=False)
            for name, tensor in chain(parameters, buffers):
                names, all_names = found.setdefault(tensor, ({}, []))
                names.setdefault(j, name)
                all_names.append(name)
    return [
        Tie(names, tuple(all_names), isinstance(tensor, nn.Parameter))
        for tensor, (names, all_names) in found.items()
        if len({name.partition(".")[0] for name in all_names}) > 1
    ]
