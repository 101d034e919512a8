"""Parameters of which several pipelines hold shards: DTensors of FSDP2 and tensor parallelism.

    pipeline 0   its shards, with their offsets; values that all pipelines have; what is in extra
    pipeline 1   its shards, with their offsets; its random number generators

Each process saves its own shards, and a file names where in the whole tensor they are. So nothing
is gathered to be saved, and what is loaded does not depend on how layers are sharded. Pipelines are
numbered by the places of their processes in the DeviceMesh that shards the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe.errors import SavedStateError
from procpipe.state.values import Stored

#: A shard in a file: a dict of its values, their offsets in the whole tensor, and its shape.
_SHARD, _OFFSETS, _SHAPE = "procpipe.shard", "offsets", "shape"


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


# -- to files ------------------------------------------------------------------------------------


def share_of(values: Mapping[str, Any], *, keeps: bool, in_shards: bool = True) -> dict[str, Any]:
    """Return what a process writes of nested values that several pipelines have.

    All processes that share them call it. ``keeps`` says whether this one writes what is no
    DTensor, and, without ``in_shards``, DTensors as whole tensors on the CPU.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if is_sharded(value) and in_shards:
            value = _shard_of(value, keeps=keeps)
            found |= {} if value is None else {key: value}
        elif is_sharded(value):
            whole = value.full_tensor()
            found |= {key: whole.cpu()} if keeps else {}
        elif isinstance(value, dict):
            found[key] = share_of(value, keeps=keeps, in_shards=in_shards)
        elif keeps:
            found[key] = value
    return found


def _shard_of(value: Any, *, keeps: bool) -> Any:
    """Return this process's part of a DTensor; None if a process before it has the same."""
    from torch.distributed.tensor import Replicate, Shard

    if any(type(placement) not in (Shard, Replicate) for placement in value.placements):
        whole = value.full_tensor()  # sums, and shards of shards that are not in one piece
        return whole if keeps else None
    places = zip(value.device_mesh.get_coordinate(), value.placements, strict=True)
    if any(at > 0 and type(placement) is Replicate for at, placement in places):
        return None
    [chunk] = value.__create_chunk_list__()  # as for torch.distributed.checkpoint
    return {_SHARD: value.to_local(), _OFFSETS: list(chunk.offsets), _SHAPE: list(value.shape)}


# -- from files ----------------------------------------------------------------------------------


class _InShards(Stored):
    """A tensor of which each of several files has a shard."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, self._whole)
        self.shards: dict[tuple[int, ...], Stored] = {}  # by offsets

    def _whole(self) -> Tensor:
        num_found = sum(math.prod(shard.shape) for shard in self.shards.values())
        if num_found != math.prod(self.shape):
            raise SavedStateError(f"there are {num_found} elements of a tensor {self.shape}")
        whole = torch.empty(self.shape, dtype=self.dtype)
        for offsets, shard in self.shards.items():
            ends = (at + size for at, size in zip(offsets, shard.shape, strict=True))
            whole[tuple(map(slice, offsets, ends))] = shard.get()
        return whole


def merged(contents: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    """Return a part of what all files have, by name; each tensor in shards as one."""
    found: dict[str, Any] = {}

    def merge(values: Mapping[str, Any], into: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and _SHARD in value:
                whole = into.setdefault(key, _InShards(value[_SHAPE], value[_SHARD].dtype))
                whole.shards[tuple(value[_OFFSETS])] = value[_SHARD]
            elif isinstance(value, dict):
                merge(value, into.setdefault(key, {}))
            else:
                into[key] = value

    for of_rank in contents:
        merge(of_rank[part], found)
    return found


def like(value: Tensor, own: Any) -> Any:
    """Return this process's part of a whole tensor, as its own DTensor of that shape has it."""
    from torch.distributed.tensor import distribute_tensor

    # Each process has it whole, so none sends it.
    value = value.to(own.device, own.dtype)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


# -- between pipelines ---------------------------------------------------------------------------


def gathered(module: nn.Module, value: Any) -> list[Any]:
    """Return a value of each process that shares parameters with this one; none if none does.

    They all call it, with plain JSON, and it waits for all of them.
    """
    shared, values = _widest(module), [value]
    if shared is None:
        return []
    mesh = shared.device_mesh
    for axis in reversed(range(mesh.ndim)):  # each row, then all rows: in the order of the places
        group = mesh.get_group(axis)
        data = torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)
        size = torch.tensor(len(data), device=shared.device)
        torch.distributed.all_reduce(size, torch.distributed.ReduceOp.MAX, group)
        data = F.pad(data, (0, int(size) - len(data)), value=ord(" ")).to(shared.device)
        of_all = [torch.empty_like(data) for _ in range(mesh.size(axis))]
        torch.distributed.all_gather(of_all, data, group)
        values = [each for theirs in of_all for each in json.loads(bytes(theirs.tolist()))]
    return values


def _widest(module: nn.Module) -> Any:
    """Return the parameter that most processes share."""
    shared: Any = filter(is_sharded, module.parameters())
    return max(shared, key=lambda parameter: parameter.device_mesh.size(), default=None)
