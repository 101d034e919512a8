"""The modules of a layer that FSDP gathers, and whether their parameters are shards now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class Unit:
    """A module that FSDP gathers as one, and where its first parameter is: by module and key."""

    module: Any
    owner: nn.Module
    key: str
    shard: Tensor | None = None  # this parameter between calls

    def settle(self) -> None:
        """Shard its parameters, and note the first one."""
        self.module.reshard()
        self.shard = self.owner._parameters[self.key]

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are shards now, and not gathered."""
        return self.owner._parameters[self.key] is self.shard


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
        place = next(_places_of(module), None) if _is_of_fsdp(module) else None
        if place is not None:
            yield Unit(module, *place)


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
