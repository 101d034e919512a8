"""Metadata of a message: what a receiver must know before the tensors come.

It travels ahead of the tensors, as JSON, only when it differs from that of the message before on
the same channel; both ends remember the last.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from procpipe.tree import Flat, Structure, from_json

#: The order of elements in memory that is kept, by number of dimensions, besides contiguous; a
#: tensor of any other order arrives contiguous.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class TensorMeta(NamedTuple):
    """What a receiver must know of one tensor, and whether it is to send back a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_channels_last: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    def empty(self, device: torch.device | str) -> Tensor:
        """Allocate the tensor."""
        if not self.is_channels_last:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        order = _CHANNELS_LAST[len(self.shape)]
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=order)

    def of(self, elements: Tensor) -> Tensor:
        """Return the tensor of these elements, 1-D in the order of memory; not a copy."""
        if not self.is_channels_last:
            return elements.view(self.shape)
        num, channels, *extents = self.shape
        return elements.view(num, *extents, channels).movedim(-1, 1)


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether a tensor has its elements in memory with the channels last.

    Where extents are 1 it may be contiguous, too: its strides say which it was made as.
    """
    order = _CHANNELS_LAST.get(tensor.dim())
    return (
        order is not None
        and tensor.is_contiguous(memory_format=order)
        and tensor.stride(1) == 1
        and tensor.stride(-1) == tensor.shape[1]
    )


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor with its elements one behind the other in memory, contiguous or not.

    Copies it if it is not so already. Lazy conjugation and negation are resolved.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if is_channels_last(tensor) else tensor.contiguous()


def elements(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a dense tensor's elements, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class Meta:
    """Everything of a message but the elements of its tensors; fields as in ``Flat``."""

    structure: Structure
    tensors: tuple[TensorMeta, ...]
    memories: tuple[tuple[str, ...], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()

    @cached_property
    def requires_grad(self) -> tuple[bool, ...]:
        """For each tensor, whether a gradient is to be sent back."""
        return tuple(tensor.requires_grad for tensor in self.tensors)

    @cached_property
    def sizes_bytes(self) -> list[int]:
        """Bytes of each tensor's elements."""
        return [tensor.num_bytes for tensor in self.tensors]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors' elements."""
        return sum(self.sizes_bytes)


def describe(message: Flat) -> Meta:
    """Return the metadata of a message."""
    return Meta(
        message.structure,
        tuple(
            TensorMeta(tuple(tensor.shape), tensor.dtype, requires_grad, is_channels_last(tensor))
            for tensor, requires_grad in zip(message.tensors, message.requires_grad, strict=True)
        ),
        message.memories,
        message.changes,
    )


def allocate(meta: Meta, device: torch.device | str) -> list[Tensor]:
    """Allocate the tensors of a message.

    Not as inference tensors, even in inference mode: a message may arrive early and belong to a
    later call that records gradients, which refuses tensors made in inference mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return allocate(meta, device)
    return [tensor.empty(device) for tensor in meta.tensors]


def layout(sizes_bytes: list[int], alignment: int) -> tuple[list[int], int]:
    """Return the offset of each of several tensors in one block of memory, and the block's size."""
    offsets, end = [], 0
    for size in sizes_bytes:
        offsets.append(end)
        end += -(-size // alignment) * alignment
    return offsets, end


def encode(meta: Meta) -> bytes:
    """Encode metadata as JSON."""
    tensors = [
        [t.shape, str(t.dtype).removeprefix("torch."), t.requires_grad]
        + [True] * t.is_channels_last
        for t in meta.tensors
    ]
    sharing = [meta.memories, meta.changes] if meta.memories or meta.changes else []
    return json.dumps([meta.structure, tensors, *sharing], separators=(",", ":")).encode()


def decode(data: bytes) -> Meta:
    """Decode what :func:`encode` wrote; ``ValueError`` if the bytes are not metadata."""
    try:
        structure, tensors, *sharing = json.loads(data)
        memories, changes = sharing or ((), ())
        if memories and len(memories) != len(tensors):
            raise ValueError("memories of other tensors")
        return Meta(
            from_json(structure),
            tuple(_tensor(*fields) for fields in tensors),
            tuple(tuple(map(str, names)) for names in memories),
            tuple((str(name), str(where)) for name, where in changes),
        )
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"not the metadata of a message: {data[:80]!r}") from error


def _tensor(
    extents: list[int], dtype: str, requires_grad: object, is_channels_last: object = False
) -> TensorMeta:
    shape = _shape(extents)
    if is_channels_last and len(shape) not in _CHANNELS_LAST:
        raise TypeError(f"{shape} has no channels last")
    return TensorMeta(shape, _dtype(dtype), bool(requires_grad), bool(is_channels_last))


def _shape(extents: list[int]) -> tuple[int, ...]:
    if not all(type(extent) is int and extent >= 0 for extent in extents):
        raise TypeError(f"{extents} is not a shape")
    return tuple(extents)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype
