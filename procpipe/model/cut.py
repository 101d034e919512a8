"""Cuts an ``nn.Sequential`` into partitions, and gives memory to the layers of one.

Layers keep the names they have in the full model, so that a state dict does not depend on the
balance. A model built on the meta device has shapes but no memory; only this stage's layers are
given some, and their values depend on a seed and on each layer's place in the full model, not on
the balance either.

    nn.Sequential         0        1        2        3        4        5
    balance [3, 2, 1]     └────────┬────────┘        └───┬────┘        │
    partition                      0                     1             2

Knows nothing of processes: every rank can, and does, compute every partition.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from procpipe.compute.wrappers import check_not_data_parallel
from procpipe.errors import BalanceError


def check_model(module: nn.Module) -> None:
    """Check that a model is a chain of layers that can be cut. An empty one is legal.

    Raises:
        TypeError: it is not an ``nn.Sequential``, or a module in it is data parallel.
        ValueError: it holds the same layer twice.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"the model is a {type(module).__qualname__}: pass an nn.Sequential, whose layers can "
            "be divided among the stages"
        )
    check_not_data_parallel(_layers(module))
    names: dict[nn.Module, str] = {}
    faults = []
    for name, layer in _layers(module):
        first = names.setdefault(layer, name)
        if first != name:
            faults.append(f"layers '{first}' and '{name}' are one {type(layer).__qualname__}")
    if faults:
        raise ValueError(
            f"the model holds duplicate children: {'; '.join(faults)}: build a layer of its own "
            "for each place, or put both places into one layer"
        )


def check_balance(balance: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Check that a balance places every layer once.

    Args:
        balance: layers a partition: a list, a tuple, a 1-D integer tensor, or the like.
        num_layers: layers in the model.

    Returns:
        The balance as plain integers.

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
    parts = tuple(operator.index(entry) for entry in entries)
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
    balance: Iterable[int] | None,
    num_layers: int,
    num_ranks: int,
    *,
    is_launched: bool,
    partitions_per_stage: int | None = 1,
) -> list[int]:
    """Check that a balance fits the model and the processes, and return it.

    Args:
        balance: layers in each partition.
        num_layers: layers in the model.
        num_ranks: processes of the job.
        is_launched: False for a script started without a launcher, which gets one stage whatever
            the balance.
        partitions_per_stage: partitions a process; None if that is for the schedule to say.

    Raises:
        BalanceError: there is none, it does not fit the model, or it leaves processes without work.
        IndexError: it makes more partitions than there are processes.
    """
    if balance is None:
        even = _even(num_layers, num_ranks * (partitions_per_stage or 2))
        raise BalanceError(
            f"the model has {num_layers} layers for {num_ranks} processes: say how many each stage "
            f"gets, for instance balance={even}, or have it found: "
            "balance='time', sample=x, where x is an input as for training (or balance='size')"
        )
    parts = list(check_balance(balance, num_layers))
    if not is_launched:
        return [num_layers]
    if len(parts) == num_ranks or partitions_per_stage != 1:
        return parts
    told = (
        f"balance {parts} makes {len(parts)} partitions, but there are {num_ranks} processes, and "
        f"each runs one: start {len(parts)} (torchrun --nproc_per_node={len(parts)}), or give a "
        f"balance like {_even(num_layers, num_ranks)}"
    )
    raise IndexError(told) if len(parts) > num_ranks else BalanceError(told)


def check_shared_parameters(module: nn.Sequential, balance: Sequence[int]) -> None:
    """Check that no parameter or buffer is used in two partitions.

    Args:
        module: the full model.
        balance: as :func:`check_balance` returned it.

    Raises:
        ValueError: lists every one that is, by its names in both.
    """
    users: dict[Tensor, tuple[str, int]] = {}
    faults = []
    for part, layers in enumerate(split(module, balance)):
        for name, layer in layers.items():
            for inner_name, tensor in _named_tensors(layer):
                full_name = f"{name}.{inner_name}"
                other_name, other_part = users.setdefault(tensor, (full_name, part))
                if other_part != part:
                    faults.append(
                        f"{other_name} in partition {other_part} is {full_name} in partition {part}"
                    )
    if faults:
        raise ValueError(
            f"a parameter or buffer is shared by two partitions: {'; '.join(faults)}: choose a "
            "balance that puts its users into one partition, or give each its own"
        )


def split(module: nn.Sequential, balance: Sequence[int]) -> list[dict[str, nn.Module]]:
    """Return the layers of each partition under their names in the full model.

    Args:
        module: the full model.
        balance: as :func:`check_balance` returned it.
    """
    layers = iter(_layers(module))
    return [dict(next(layers) for _ in range(part)) for part in balance]


def layer_facts(module: nn.Sequential) -> list[str]:
    """Describe each layer in a line, by which ranks find out whether they built the same model.

    Says only what a model on the meta device knows too: name, class and number of parameters.
    """
    return [
        f"{name}: {type(layer).__qualname__}, "
        f"{sum(parameter.numel() for parameter in layer.parameters()):,} parameters"
        for name, layer in _layers(module)
    ]


def materialize(
    layers: dict[str, nn.Module], device: torch.device, *, first_index: int, seed: int
) -> None:
    """Bring layers to a device, and give those on the meta device memory and initial values.

    What has memory already is moved. What has none gets some, which its module's
    ``reset_parameters()`` initialises, and after it that of each module around it. Random numbers
    come from ``seed`` and the layer's index, so the values are the same whatever the balance; the
    caller's generators are left as they were. Tensors that layers share stay shared; where several
    layers initialise one, the last does.

    Args:
        layers: the layers of one partition, by their names in the full model; changed in place.
        device: where the partition lives.
        first_index: index in the full model of the first of ``layers``.
        seed: the same on all ranks.

    Raises:
        ValueError: lists every parameter and buffer that nothing initialises.
    """
    memory: dict[Tensor, Tensor] = {}
    places = []
    for index, (name, layer) in enumerate(layers.items(), start=first_index):
        modules_to_reset = _modules_on_meta(layer)
        for place in _places_on_meta(name, layer):
            place.allocate(device, memory)
            places.append(place)
        if modules_to_reset:
            with _seeded(device, seed, index):
                for module in modules_to_reset:
                    _reset_function(module)()
    unwritten = {tensor for tensor in memory.values() if _is_unwritten(tensor)}
    faults = [place.fault for place in places if place.value in unwritten]
    if faults:
        raise ValueError(
            f"the model was built on the meta device, and nothing initialises {'; '.join(faults)}: "
            "give the layer a reset_parameters() that sets all its parameters and buffers, or "
            "build it on the CPU"
        )
    for layer in layers.values():
        layer.to(device)


@dataclass(frozen=True)
class _Place:
    """One parameter or buffer on the meta device.

    Attributes:
        owner: the module that holds it itself.
        key: its name there.
        full_name: its name in the full model.
    """

    owner: nn.Module
    key: str
    full_name: str

    @property
    def value(self) -> Tensor:
        value = getattr(self.owner, self.key)
        assert isinstance(value, Tensor)
        return value

    @property
    def fault(self) -> str:
        owner = type(self.owner).__qualname__
        if _reset_function(self.owner) is _do_nothing:
            return f"{self.full_name} ({owner} has no reset_parameters())"
        return f"{self.full_name} ({owner}.reset_parameters() leaves it unset)"

    def allocate(self, device: torch.device, memory: dict[Tensor, Tensor]) -> None:
        """Replace the tensor, using the same memory wherever the model uses the same tensor.

        Writes by setattr, since nn.LSTM and its kind keep a second list of their weights.
        """
        if self.value not in memory:
            memory[self.value] = _allocated(self.value, device)
        setattr(self.owner, self.key, memory[self.value])


def _even(num_layers: int, num_stages: int) -> list[int]:
    """Return an even balance, as a suggestion."""
    ends = [num_layers * j // num_stages for j in range(num_stages + 1)]
    return [end - start for start, end in pairwise(ends)]


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all children with their names; ``named_children`` would pass over duplicates."""
    return [(name, layer) for name, layer in module._modules.items() if layer is not None]


def _named_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(layer.named_parameters(), layer.named_buffers())


def _places_on_meta(name: str, layer: nn.Module) -> list[_Place]:
    return [
        _Place(owner, key, ".".join(filter(None, (name, path, key))))
        for path, owner in layer.named_modules()
        for key, tensor in chain(owner._parameters.items(), owner._buffers.items())
        if tensor is not None and tensor.is_meta
    ]


def _modules_on_meta(layer: nn.Module) -> list[nn.Module]:
    """Return the modules with tensors on the meta device in them or below, inner ones first."""
    outer_first = [
        module
        for module in layer.modules()
        if any(tensor.is_meta for _, tensor in _named_tensors(module))
    ]
    return outer_first[::-1]


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory for a tensor on the meta device, such that :func:`_is_unwritten` of it."""
    if tensor.is_floating_point() or tensor.is_complex():
        memory = torch.full_like(tensor, math.nan, device=device, requires_grad=False)
    else:
        memory = torch.zeros_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    memory.__dict__.update(tensor.__dict__)
    return memory


def _is_unwritten(memory: Tensor) -> bool:
    if memory.is_floating_point() or memory.is_complex():
        return bool(memory.isnan().any())
    return memory._version == 0


def _reset_function(module: nn.Module) -> Callable[[], None]:
    """Return what initialises a module. nn.MultiheadAttention has it under a private name."""
    for name in ("reset_parameters", "_reset_parameters"):
        function: Callable[[], None] | None = getattr(module, name, None)
        if function is not None:
            return function
    return _do_nothing


def _do_nothing() -> None:
    pass


@contextmanager
def _seeded(device: torch.device, seed: int, index: int) -> Iterator[None]:
    """Draw from generators that depend on the seed and the layer only, then put them back.

    The two are hashed, as layer 1 under seed 0 must not be layer 0 under seed 1.
    """
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    layer_seed = int.from_bytes(digest, "little")
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(layer_seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(layer_seed)
        yield
