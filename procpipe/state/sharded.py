"""Parameters of which several pipelines hold shards: DTensors of FSDP2 and tensor parallelism.

    pipeline 0   ── whole values ──> its parts of the saved state, or of an export
    pipeline 1   ── shards ──┘       its random number generators, and what is in extra

So files are those of one pipeline, and do not depend on how its layers are sharded. Pipelines are
numbered by the places of their processes in the DeviceMesh that shards the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: The bytes that a path may have.
_MAX_BYTES = 4096


def is_sharded(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    return hasattr(value, "full_tensor")


def place_of(module: nn.Module) -> tuple[int, int]:
    """Return which of how many pipelines a process is in, as far as its own parameters show."""
    found = _widest(module)
    if found is None:
        return 0, 1
    mesh = found.device_mesh
    return mesh.mesh.flatten().tolist().index(mesh.get_rank()), mesh.size()


def whole(values: Mapping[str, Any], *, keeps: bool) -> dict[str, Any]:
    """Return values with DTensors made whole, on the CPU; all processes that share them call it.

    ``keeps`` says whether they are needed here.
    """
    found = {}
    for key, value in values.items():
        if is_sharded(value):
            value = value.full_tensor()
            value = value.cpu() if keeps else None
        found[key] = value
    return found


def like(value: Any, own: Any) -> Any:
    """Return this process's part of a whole tensor, if its own is a DTensor of that shape."""
    if not is_sharded(own) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Each process has it whole, so none sends it.
    value = value.to(own.device, own.dtype)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def from_first(module: nn.Module, text: str) -> str:
    """Return the text of the first process of those that share parameters; "" if none does.

    They all call it, and it waits for all of them.
    """
    shared = _widest(module)
    if shared is None:
        return ""
    from torch.distributed.tensor import DTensor, Partial

    mesh = shared.device_mesh
    data = torch.zeros(_MAX_BYTES, dtype=torch.int32)
    if not any(mesh.get_coordinate()):
        encoded = text.encode()
        data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.int32)
    part = DTensor.from_local(data.to(shared.device), mesh, [Partial()] * mesh.ndim)
    return bytes(byte for byte in part.full_tensor().tolist() if byte).decode()


def _widest(module: nn.Module) -> Any:
    """Return the parameter that most processes share."""
    shared: Any = filter(is_sharded, module.parameters())
    return max(shared, key=lambda parameter: parameter.device_mesh.size(), default=None)
