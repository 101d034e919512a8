"""Cuts an ``nn.Sequential`` into partitions, whose layers keep their names in the full model.

    nn.Sequential         0        1        2        3        4        5
    balance [3, 2, 1]     └────────┬────────┘        └───┬────┘        │
    partition                      0                     1             2

Independent of processes: every rank computes every partition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, pairwise

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from procpipe.compute.wrappers import check_not_data_parallel
from procpipe.errors import BalanceError
from procpipe.words import counted


def check_model(module: nn.Module) -> None:
    """Check that a model is a chain of layers that can be cut. An empty one is legal.

    Raises:
        TypeError: it is not an ``nn.Sequential``, or a module in it is data parallel.
        ValueError: it holds the same layer twice, or parameters that have no shape yet.
    """
    if isinstance(module, nn.Module):
        check_not_data_parallel(module)
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"the model is a {type(module).__qualname__}: pass an nn.Sequential, whose layers can "
            "be divided among the stages. procpipe.sequential(model, sample) makes one of an "
            "ordinary module and a sample of its inputs: see docs/any_module.md"
        )
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
    num_ranks: int,
    *,
    is_launched: bool,
    num_replicas: int = 1,
    partitions_per_stage: int | None = 1,
    of_mesh: Sequence[int] | None = None,
) -> list[int]:
    """Check that a balance fits the model and the processes, and return it.

    A script that no launcher started (``is_launched=False``) gets one stage, whatever the balance.
    ``partitions_per_stage`` is None where the schedule decides that. ``of_mesh`` holds the ranks of
    a pipeline that has others beside it.

    Raises:
        BalanceError: it does not fit the model, or it leaves processes without work.
        IndexError: it makes more partitions than there are processes.
    """
    parts = list(check_balance(balance, num_layers))
    if not is_launched:
        return [num_layers]
    if len(parts) == num_ranks or partitions_per_stage != 1:
        return parts
    n, all_ranks = len(parts), num_ranks * num_replicas
    replicas = f" for {num_replicas} replicas" if num_replicas > 1 else ""
    are = "there is 1 process" if all_ranks == 1 else f"there are {all_ranks} processes{replicas}"
    ways = [f"start {n * num_replicas} (torchrun --nproc_per_node={n * num_replicas})"]
    instead = []
    if of_mesh is not None:
        are, ways = f"the mesh of this pipeline has {num_ranks} ranks, {list(of_mesh)}", []
        instead.append(f"a dimension of size {n}")
    elif all_ranks > n and all_ranks % n == 0:
        instead.append(f"replicas={all_ranks // n}")
    if num_layers >= num_ranks:
        instead.append(f"a balance like {_even(num_layers, num_ranks)}")
    if instead:
        ways.append(f"give {', or '.join(instead)}")
    makes = f"balance {parts} makes {counted(n, 'partition')}"
    fault = f"{makes}, but {are}, and each runs one: {', or '.join(ways)}"
    raise IndexError(fault) if n > num_ranks else BalanceError(fault)


def replicas_for(
    num_ranks: int, num_partitions: int, partitions_per_stage: int | None
) -> int | None:
    """Return the least number of replicas with which each stage gets its partitions, if any.

    ``partitions_per_stage`` is None where any number is right that is the same for all.
    """
    for num_stages in range(num_ranks, 0, -1):
        v, rest = divmod(num_partitions, num_stages)
        fits = v > 0 and rest == 0 and partitions_per_stage in (None, v)
        if fits and num_ranks % num_stages == 0:
            return num_ranks // num_stages
    return None


def check_enough_layers(
    num_layers: int,
    num_ranks: int,
    num_replicas: int,
    count: Callable[[int], int],
    of_mesh: Sequence[int] | None = None,
) -> None:
    """Check that each partition gets a layer; ``count`` returns how many there are for n stages.

    ``of_mesh`` holds the ranks of a pipeline that has others beside it.

    Raises:
        BalanceError: there are too many processes; suggests replicas.
    """
    num_stages = num_ranks // num_replicas
    if num_layers == 0 or count(num_stages) <= num_layers:
        return
    fits = next(
        (n for n in range(num_stages, 0, -1) if num_ranks % n == 0 and count(n) <= num_layers), None
    )
    replicas = f" for {num_replicas} replicas" if num_replicas > 1 else ""
    are = "there is 1 process" if num_ranks == 1 else f"there are {num_ranks} processes{replicas}"
    fewer = "start fewer, or " if num_ranks > 1 else ""
    instead = "" if fits is None else f"give replicas={num_ranks // fits}, or "
    if of_mesh is not None:
        are = f"the mesh of this pipeline has {num_ranks} ranks, {list(of_mesh)}"
        fewer, instead = "" if fits is None else f"give a dimension of size {fits}, or ", ""
    raise BalanceError(
        f"cannot divide {counted(num_layers, 'layer')} into {count(num_stages)} partitions, each "
        f"of at least one layer, as {are}: {fewer}{instead}divide the model into more layers"
    )


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


def _even(num_layers: int, num_stages: int) -> list[int]:
    """Return an even balance, as a suggestion."""
    ends = [num_layers * j // num_stages for j in range(num_stages + 1)]
    return [end - start for start, end in pairwise(ends)]


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # ``named_children`` would pass over duplicates.
    return [(name, layer) for name, layer in module._modules.items() if layer is not None]
