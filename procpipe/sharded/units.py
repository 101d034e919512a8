"""The modules of a layer that FSDP gathers, and where their parameters are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class Unit:
    """A module that FSDP gathers as one."""

    module: Any
    places: list[tuple[nn.Module, str]]  # where its parameters are: by module and key
    shards: list[Tensor] = field(default_factory=list)  # they, between calls

    def parameters(self) -> list[Any]:
        """Return the parameters, as they are now: shards, or gathered."""
        return [owner._parameters[key] for owner, key in self.places]

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are shards now."""
        return all(p is shard for p, shard in zip(self.parameters(), self.shards, strict=True))


def roots_of(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that FSDP gathers."""
    if _is_of_fsdp(module):
        if next(module.parameters(), None) is not None:
            yield module
        return
    for child in module.children():
        yield from roots_of(child)


def units_of(root: nn.Module) -> Iterator[Unit]:
    """Yield the modules below that FSDP gathers, and have parameters."""
    for module in root.modules():
        if _is_of_fsdp(module):
            places = list(_places_of(module))
            if places:
                yield Unit(module, places)


def num_gathered(root: nn.Module) -> int:
    """Return how many modules FSDP gathers, this one and those inside."""
    return sum(map(_is_of_fsdp, root.modules()))


def set_last(root: Any) -> None:
    """Set FSDP to reduce the gradients of a module, and to shard it again, in its next pass."""
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    root.set_is_last_backward(True)


def _places_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield where the parameters are that FSDP gathers with a module."""
    for key, parameter in module._parameters.items():
        if hasattr(parameter, "device_mesh"):
            yield module, key
    for child in module.children():
        if not _is_of_fsdp(child):
            yield from _places_of(child)


def _is_of_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")
