"""Gives layers that were built on the meta device memory and initial values.

A model on the meta device has shapes but no memory. Only this stage's layers are given some; their
values depend on a seed and on each layer's index in the full model, not on the balance.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn


def materialize(
    layers: Mapping[str, nn.Module], ours: Collection[str], device: torch.device, *, seed: int
) -> None:
    """Allocate and initialise those of some layers of a model that are on the meta device.

    Memory is initialised by its module's ``reset_parameters()`` and then by that of each module
    around it, with random numbers from ``seed`` and the layer's index. Tensors that have values are
    left as they were, and so are the caller's generators. Shared tensors stay shared, and the last
    layer that initialises one counts, but for zeros in an embedding's row of padding: a layer of
    another stage that shares one with ours is initialised too, and let go of.

    ``layers`` are all of the model, by name and in order, of which ``ours`` stay here; the seed is
    the same on all ranks.

    Raises:
        ValueError: lists every parameter and buffer that nothing initialises.
    """
    memory: dict[Tensor, Tensor] = {}
    places: list[_Place] = []
    padding: dict[Tensor, int] = {}
    shared = {place.tensor for name in ours for place in _places_on_meta(name, layers[name])}
    for index, (name, layer) in enumerate(layers.items()):
        of_layer = _places_on_meta(name, layer)
        if shared.isdisjoint(place.tensor for place in of_layer):
            continue
        kept = [
            (tensor, tensor.detach().clone())
            for tensor in chain(layer.parameters(), layer.buffers())
            if not (tensor.is_meta or tensor.is_inference())
        ]
        for owner, key, _, tensor in of_layer:
            if tensor not in memory:
                memory[tensor] = _allocated(tensor, device)
            # By setattr, since recurrent layers keep a second list of their weights.
            setattr(owner, key, memory[tensor])
        with _seeded(device, seed, index):
            for module in reversed(list(layer.modules())):
                # nn.MultiheadAttention has it under a private name.
                private = getattr(module, "_reset_parameters", None)
                if (reset := getattr(module, "reset_parameters", private)) is not None:
                    reset()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
            for owner, key, _, tensor in of_layer:
                if tensor in padding:
                    memory[tensor][padding[tensor]] = 0
                if isinstance(owner, nn.Embedding) and key == "weight":
                    row = owner.padding_idx
                    if row is not None and not memory[tensor][row].any():
                        padding[tensor] = row
        for place in of_layer:
            if place.tensor in shared:  # and stays so: the model may be given to another stage
                places.append(place)
            else:
                setattr(place.owner, place.key, place.tensor)
                memory.pop(place.tensor, None)
    _check_initialised(places, memory.values())


class _Place(NamedTuple):
    """Where a parameter or buffer on the meta device is."""

    owner: nn.Module
    key: str  # its name there
    full_name: str  # its name in the model
    tensor: Tensor


def _places_on_meta(name: str, layer: nn.Module) -> list[_Place]:
    return [
        _Place(owner, key, ".".join(filter(None, (name, path, key))), tensor)
        for path, owner in layer.named_modules()
        for key, tensor in chain(owner._parameters.items(), owner._buffers.items())
        if tensor is not None and tensor.is_meta
    ]


def _check_initialised(places: Iterable[_Place], allocated: Iterable[Tensor]) -> None:
    """Check that memory which was allocated for these places has been written to."""
    unwritten = {tensor for tensor in allocated if _is_unwritten(tensor)}
    faults = [
        f"{place.full_name} (of a {type(place.owner).__qualname__})"
        for place in places
        if getattr(place.owner, place.key) in unwritten
    ]
    if faults:
        raise ValueError(
            f"the model was built on the meta device, and nothing initialises {'; '.join(faults)}: "
            "give the layer a reset_parameters() that sets all its parameters and buffers, or "
            "build it on the CPU"
        )


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory for a tensor on the meta device, marked for :func:`_is_unwritten`."""
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
        # In pieces, as the result for all of it would be memory beside the stage's own.
        return any(bool(part.isnan().any()) for part in memory.flatten().split(1 << 20))
    return memory._version == 0


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
