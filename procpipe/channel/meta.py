"""Metadata of a message: what a receiver must know before the tensors come.

It travels ahead of the tensors, as JSON, only when it differs from that of the message before on
the same channel; both ends remember the last.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from procpipe.tree import Flat, Structure

#: The order of elements in memory that is kept, by number of dimensions, besides contiguous; a
#: tensor of any other order arrives contiguous.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


#: Tensors in one block of memory begin at multiples of this, for fast copies; torch's own at some.
ALIGNMENT = 256


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


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor, which keeps the tensor for as long as it is used."""
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


@dataclass(frozen=True)
class Meta:
    """Everything of a message but the elements of its tensors; fields as in ``Flat``."""

    structure: Structure
    tensors: tuple[TensorMeta, ...]

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


def layout(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Return the offset of each of several tensors in one block of memory, and the block's size."""
    offsets, end = [], 0
    for size in sizes_bytes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def tensors_in(memory: memoryview, meta: Meta) -> list[Tensor]:
    """Return the tensors of a message that is in a block of memory, which they keep; no copies.

    No inference tensors, see :func:`allocate`.
    """
    offsets, _ = layout(meta.sizes_bytes)
    with torch.inference_mode(False):
        return [
            tensor.of(torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset))
            if (count := size // tensor.dtype.itemsize)
            else tensor.empty("cpu")
            for tensor, size, offset in zip(meta.tensors, meta.sizes_bytes, offsets, strict=True)
        ]


def encode(meta: Meta) -> bytes:
    """Encode metadata as JSON."""
    tensors = [
        (t.shape, str(t.dtype).removeprefix("torch."), t.requires_grad, t.is_channels_last)
        for t in meta.tensors
    ]
    return json.dumps((meta.structure, tensors), separators=(",", ":")).encode()


def decode(data: bytes) -> Meta:
    """Decode what :func:`encode` wrote."""
    structure, tensors = json.loads(data)
    return Meta(
        tuple(structure),
        tuple(
            TensorMeta(tuple(shape), getattr(torch, dtype), *flags)
            for shape, dtype, *flags in tensors
        ),
    )
