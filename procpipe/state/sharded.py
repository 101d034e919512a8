"""Parameters of which several pipelines hold shards: DTensors of FSDP2 and tensor parallelism.

    pipeline 0   its shards, with their offsets; values that all pipelines have; what is in extra
    pipeline 1   its shards, with their offsets; its random number generators

Each process saves its own shards, and a file names where in the whole tensor they are. So nothing
is gathered to be saved, and what is loaded does not depend on how layers are sharded. Pipelines are
numbered by the places of their processes in the DeviceMesh that shards the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.errors import SavedStateError
from procpipe.state.mapped import Mapped

#: A shard in a file: a dict of its values, their offsets in the whole tensor, and its shape.
_SHARD, _OFFSETS, _SHAPE = "procpipe.shard", "offsets", "shape"

#: The bytes that a text may have.
_MAX_BYTES = 4096


class Shards:
    """A tensor in files, in one piece or in several."""

    def __init__(self, shape: Iterable[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._pieces: list[tuple[tuple[int, ...], Tensor]] = []

    def add(self, offsets: Iterable[int], piece: Tensor) -> None:
        """Add what is there from these offsets on."""
        self._pieces.append((tuple(offsets), piece))

    def copy_into(self, target: Tensor, mapped: Mapped) -> None:
        """Copy all pieces into a tensor of this shape.

        Raises:
            SavedStateError: a piece is missing.
        """
        found = sum(piece.numel() for _, piece in self._pieces)
        if found != math.prod(self.shape):
            raise SavedStateError(
                f"there are shards of {found} of the {math.prod(self.shape)} elements of a tensor "
                f"{self.shape}"
            )
        for offsets, piece in self._pieces:
            ends = (at + size for at, size in zip(offsets, piece.shape, strict=True))
            mapped.copy(piece, target[tuple(map(slice, offsets, ends))])


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


def share_of(values: Mapping[str, Any], *, keeps: bool) -> dict[str, Any]:
    """Return what a process saves of nested values that several pipelines have.

    All processes that share them call it. ``keeps`` says whether this one saves what is no DTensor.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if is_sharded(value):
            value = _shard_of(value, keeps=keeps)
            found |= {} if value is None else {key: value}
        elif isinstance(value, dict):
            found[key] = share_of(value, keeps=keeps)
        elif keeps:
            found[key] = value
    return found


def _shard_of(value: Any, *, keeps: bool) -> Any:
    """Return this process's part of a DTensor; None if a process before it has the same."""
    from torch.distributed.tensor import Replicate, Shard

    if any(type(placement) not in (Shard, Replicate) for placement in value.placements):
        whole = value.full_tensor()  # sums, and shards of shards that are not in one piece
        return whole if keeps else None
    offsets, sizes, mesh = [0] * value.ndim, list(value.shape), value.device_mesh
    for axis, (at, placement) in enumerate(
        zip(mesh.get_coordinate(), value.placements, strict=True)
    ):
        if type(placement) is Replicate:
            if at > 0:
                return None
            continue
        dim = placement.dim % value.ndim
        most = -(-sizes[dim] // mesh.size(axis))  # as torch.chunk
        start = min(at * most, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(most, sizes[dim] - start)
    local = value.to_local()
    assert tuple(local.shape) == tuple(sizes), f"torch shards {tuple(local.shape)}, not {sizes}"
    return {_SHARD: local, _OFFSETS: offsets, _SHAPE: list(value.shape)}


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


# -- from files ----------------------------------------------------------------------------------


def merged(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the nested values of all files by name, each tensor in shards as one value."""
    found: dict[str, Any] = {}
    for values in of_ranks:
        for key, value in values.items():
            if isinstance(value, dict) and _SHARD in value:
                made = Shards(value[_SHAPE], value[_SHARD].dtype)
                found.setdefault(key, made).add(value[_OFFSETS], value[_SHARD])
            elif isinstance(value, dict):
                found[key] = merged([found.get(key, {}), value])
            else:
                found[key] = value
    return found


def like(value: Tensor, own: Any) -> Any:
    """Return this process's part of a whole tensor, if its own is a DTensor of that shape."""
    if not is_sharded(own) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Each process has it whole, so none sends it.
    value = value.to(own.device, own.dtype)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


# -- between pipelines ---------------------------------------------------------------------------


def from_first(module: nn.Module, text: str) -> str:
    """Return the text of the first process of those that share parameters; "" if none does.

    They all call it, and it waits for the first.
    """
    shared = _widest(module)
    if shared is None:
        return ""
    if len(text.encode()) > _MAX_BYTES:  # of another size than on the other ranks
        raise ValueError(f"{text:.100}… has more than {_MAX_BYTES} bytes: use a shorter path")
    data = torch.tensor(list(text.encode().ljust(_MAX_BYTES)), dtype=torch.uint8)
    data = data.to(shared.device)
    mesh = shared.device_mesh
    for axis in range(mesh.ndim):  # to all of the first row, then from each of it
        torch.distributed.broadcast(data, group=mesh.get_group(axis), group_src=0)
    return bytes(data.tolist()).rstrip().decode()


def any_of(module: nn.Module, flag: bool) -> bool:
    """Return whether a flag is set in any process of those that share parameters with this one.

    They all call it, and it waits for all of them.
    """
    shared = _widest(module)
    if shared is None:
        return flag
    data = torch.tensor([int(flag)], device=shared.device)
    for axis in range(shared.device_mesh.ndim):
        torch.distributed.all_reduce(data, group=shared.device_mesh.get_group(axis))
    return bool(data.item())


def _widest(module: nn.Module) -> Any:
    """Return the parameter that most processes share."""
    shared: Any = filter(is_sharded, module.parameters())
    return max(shared, key=lambda parameter: parameter.device_mesh.size(), default=None)
