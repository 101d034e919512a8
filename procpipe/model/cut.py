"""Cuts an ``nn.Sequential`` into partitions, whose layers keep their names in the full model.

    nn.Sequential         0        1        2        3        4        5
    balance [3, 2, 1]     └────────┬────────┘        └───┬────┘        │
    partition                      0                     1             2

Independent of processes: every rank computes every partition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from torch import nn

from procpipe.compute.wrappers import check_not_data_parallel
from procpipe.errors import BalanceError


def check_module(module: Any) -> None:
    """Check that a model is a module, and that none in it is data parallel.

    Raises:
        TypeError: it is none, or one is.
    """
    if not isinstance(module, nn.Module):
        is_class = isinstance(module, type)
        what = f"the class {module.__name__}" if is_class else f"a {type(module).__qualname__}"
        raise TypeError(f"the model is {what}: pass an nn.Module, that is, an instance of a class")
    check_not_data_parallel(module)


def check_model(module: nn.Module) -> None:
    """Check that a model is a chain of layers that can be cut. An empty one is legal.

    Raises:
        TypeError: it is not an ``nn.Sequential``, or a module in it is data parallel.
        ValueError: it holds the same layer twice.
    """
    check_module(module)
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"the model is a {type(module).__qualname__}: pass an nn.Sequential, whose layers can "
            "be divided among the stages. procpipe.sequential(model, sample) makes one of an "
            "ordinary module and a sample of its inputs: see docs/any_module.md"
        )
    names: dict[nn.Module, str] = {}
    twice = [
        f"layers '{names[layer]}' and '{name}' are one {type(layer).__qualname__}"
        for name, layer in module._modules.items()  # children() would pass over duplicates
        if names.setdefault(layer, name) != name and layer is not None
    ]
    if twice:
        raise ValueError(
            f"the model holds duplicate children: {'; '.join(twice)}: build a layer of its own for "
            "each place, or put both places into one layer"
        )


def check_balance(balance: Iterable[int], num_layers: int) -> list[int]:
    """Check that a balance places every layer once; return it as plain integers.

    Raises:
        TypeError: it is no list of integers.
        BalanceError: an entry is less than 1, or they do not add up to ``num_layers``.
    """
    try:
        parts = [operator.index(entry) for entry in balance]
    except TypeError:
        raise TypeError(
            f"the balance is {balance!r}: give the number of layers of each partition, as in "
            f"balance=[{num_layers}]"
        ) from None
    if any(part < 1 for part in parts):
        raise BalanceError(
            f"the balance {parts} has a partition of less than one layer: give each at least "
            "1, or use fewer partitions"
        )
    if sum(parts) != num_layers:
        raise BalanceError(
            f"the balance {parts} places {sum(parts)} layers but the model has {num_layers}: "
            f"make its entries add up to {num_layers}"
        )
    return parts


def cut(module: nn.Sequential, balance: Sequence[int]) -> list[dict[str, nn.Module]]:
    """Return the layers of each partition under their names in the full model."""
    layers = module.named_children()
    return [dict(islice(layers, num_layers)) for num_layers in balance]


def layer_facts(module: nn.Sequential) -> list[str]:
    """Describe each layer in a line, so that ranks can compare the models they have built."""
    return [
        f"{name}: {type(layer).__qualname__}{getattr(layer, 'recorded_as', '')}, "
        f"{sum(parameter.numel() for parameter in layer.parameters()):,} parameters"
        for name, layer in module.named_children()
    ]
