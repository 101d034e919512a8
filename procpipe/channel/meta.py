"""Metadata of a message: what a receiver must know before the tensors come.

It travels ahead of the tensors, as JSON, only when it differs from that of the message before on
the same channel; both ends remember the last.
"""

from __future__ import annotations

import ctypes
import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from procpipe.tree import Flat, Structure

#: Tensors in one block of memory begin at multiples of this, for fast copies; torch's own at some.
ALIGNMENT = 256


class TensorMeta(NamedTuple):
    """What a receiver must know of one tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device | str) -> Tensor:
        """Allocate the tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


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
    requires_grad: tuple[bool, ...]

    @cached_property
    def places(self) -> list[tuple[TensorMeta, int, int]]:
        """Each tensor, its number of elements, and its offset in a block of memory."""
        counts = [math.prod(tensor.shape) for tensor in self.tensors]
        sizes = [k * tensor.dtype.itemsize for k, tensor in zip(counts, self.tensors, strict=True)]
        return list(zip(self.tensors, counts, layout(sizes)[0], strict=True))


def _as_usual() -> AbstractContextManager[object]:
    """Make no inference tensors within, even in inference mode.

    A message may arrive early and belong to a later call that records gradients, which refuses
    tensors made in inference mode.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def allocate(meta: Meta, device: torch.device | str) -> list[Tensor]:
    """Allocate the tensors of a message."""
    with _as_usual():
        return [tensor.empty(device) for tensor in meta.tensors]


def layout(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Return the offset of each of several tensors in one block of memory, and the block's size."""
    offsets, end = [], 0
    for size in sizes_bytes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def block_of(tensors: list[Tensor]) -> list[Any]:
    """Return the parts of a block of memory: those of dense CPU tensors, and what is between."""
    parts: list[Any] = []
    for memory in map(memory_of, tensors):
        parts += [memory, bytes(-len(memory) % ALIGNMENT)]
    return parts


def tensors_in(memory: memoryview, meta: Meta) -> list[Tensor]:
    """Return the tensors of a message that is in a block of memory, which they keep; no copies."""
    with _as_usual():
        return [
            torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset).as_strided(
                tensor.shape, tensor.strides
            )
            if count
            else tensor.empty("cpu")
            for tensor, count, offset in meta.places
        ]


def encode(message: Flat, tensors: list[Tensor]) -> bytes:
    """Encode the metadata of a message as JSON, in a multiple of ``ALIGNMENT`` bytes.

    ``tensors`` are those of the message, made dense.
    """
    metas = [(t.shape, t.stride(), str(t.dtype).removeprefix("torch.")) for t in tensors]
    _, structure, requires_grad = message
    text = json.dumps((structure, metas, requires_grad), separators=(",", ":"))
    return text.encode().ljust(layout([len(text)])[1])


def decode(data: bytes) -> Meta:
    """Decode what :func:`encode` wrote."""
    structure, tensors, requires_grad = json.loads(data)
    return Meta(
        tuple(structure),
        tuple(
            TensorMeta(tuple(shape), tuple(strides), getattr(torch, dtype))
            for shape, strides, dtype in tensors
        ),
        tuple(requires_grad),
    )
