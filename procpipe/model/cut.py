"""Cuts an ``nn.Sequential`` into partitions, whose layers keep their names in the full model.

    nn.Sequential         0        1        2        3        4        5
    balance [3, 2, 1]     └────────┬────────┘        └───┬────┘        │
    partition                      0                     1             2

Independent of processes: every rank computes every partition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from procpipe.compute.wrappers import (
    check_not_data_parallel,
    is_data_parallel,
    refuse_data_parallel,
)
from procpipe.errors import BalanceError
from procpipe.words import counted


def check_model(module: nn.Module) -> None:
    """Check that a model is a chain of layers that can be cut. An empty one is legal.

    Raises:
        TypeError: it is not an ``nn.Sequential``, or a module in it is data parallel.
        ValueError: it holds the same layer twice, or parameters that have no shape yet.
    """
    if is_data_parallel(type(module)):
        refuse_data_parallel(f"the model is a {type(module).__name__}")
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"the model is a {type(module).__qualname__}: pass an nn.Sequential, whose layers can "
            "be divided among the stages"
        )
    check_not_data_parallel(_layers(module))
    names: dict[nn.Module, str] = {}
    twice = [
        f"layers '{names[layer]}' and '{name}' are one {type(layer).__qualname__}"
        for name, layer in _layers(module)
        if names.setdefault(layer, name) != name
    ]
    if twice:
        raise ValueError(
            f"the model holds duplicate children: {'; '.join(twice)}: build a layer of its own for "
            "each place, or put both places into one layer"
        )
    lazy = [
        f"'{name}' ({type(layer).__qualname__})"
        for name, layer in _layers(module)
        if any(map(is_lazy, chain(layer.parameters(), layer.buffers())))
    ]
    if lazy:
        raise ValueError(
            f"parameters or buffers of {', '.join(lazy)} have no shape yet, which lazy modules get "
            "from their first input: call the model once before Stage, model(x), with the same "
            "random seed on each rank, or give the modules their numbers of features"
        )


def check_balance(balance: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Check that a balance places every layer once; return it as plain integers.

    Raises:
        TypeError: it is not iterable, or an entry is not an integer.
        BalanceError: an entry is less than 1, or they do not add up to ``num_layers``.
    """
    if not isinstance(balance, Iterable):
        raise TypeError(
            f"the balance is {balance!r}: pass the number of layers of each partition, as in "
            f"balance=[{num_layers}]"
        )
    entries = balance.tolist() if isinstance(balance, Tensor) else list(balance)
    if not all(hasattr(entry, "__index__") and not isinstance(entry, bool) for entry in entries):
        raise TypeError(
            f"the balance {entries} holds more than integers: pass the number of layers of each "
            "partition"
        )
    parts = tuple(map(operator.index, entries))
    if any(part < 1 for part in parts):
        raise BalanceError(
            f"the balance {list(parts)} has a partition of less than one layer: give each at least "
            "1, or use fewer partitions"
        )
    if sum(parts) != num_layers:
        raise BalanceError(
            f"the balance {list(parts)} places {sum(parts)} layers but the model has {num_layers}: "
            f"make its entries add up to {num_layers}"
        )
    return parts


def fit_balance(
    balance: Iterable[int],
    num_layers: int,
    num_stages: int,
    *,
    is_launched: bool,
    num_replicas: int = 1,
    is_of_mesh: bool = False,
    partitions_per_stage: int | None = 1,
) -> list[int]:
    """Check that a balance fits the model and the processes, and return it.

    A script that no launcher started (``is_launched=False``) gets one stage, whatever the balance.
    ``partitions_per_stage`` is None where the schedule decides that; ``is_of_mesh`` says whether
    other ranks of the job make pipelines of their own.

    Raises:
        BalanceError: it does not fit the model, or it leaves processes without work.
        IndexError: it makes more partitions than the pipeline has processes.
    """
    parts = list(check_balance(balance, num_layers))
    if not is_launched:
        return [num_layers]
    n = len(parts)
    if n == num_stages or partitions_per_stage != 1:
        return parts
    num_ranks, fitting = num_stages * num_replicas, n * num_replicas
    start, replicas = f"start {fitting} (torchrun --nproc_per_node={fitting})", ""
    if is_of_mesh:
        start = f"give a dimension of size {n}"
    elif num_ranks > n and num_ranks % n == 0:
        replicas = f"replicas={num_ranks // n}, or "
    fault = (
        f"balance {parts} makes {counted(n, 'partition')}, but the pipeline has "
        f"{counted(num_stages, 'process')}, and each runs one: {start}, or give {replicas}a "
        f"balance of {counted(num_stages, 'partition')}"
    )
    raise IndexError(fault) if n > num_stages else BalanceError(fault)


def cut(module: nn.Sequential, balance: Sequence[int]) -> list[dict[str, nn.Module]]:
    """Return the layers of each partition under their names in the full model."""
    layers = iter(_layers(module))
    return [dict(islice(layers, num_layers)) for num_layers in balance]


def layer_facts(module: nn.Sequential) -> list[str]:
    """Describe each layer in a line, so that ranks can compare the models they have built."""
    return [
        f"{name}: {type(layer).__qualname__}, "
        f"{sum(parameter.numel() for parameter in layer.parameters()):,} parameters"
        for name, layer in _layers(module)
    ]


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # ``named_children`` would pass over duplicates.
    return [(name, layer) for name, layer in module._modules.items() if layer is not None]
