"""Metadata of a message: what a receiver must know before the tensors come.

It travels ahead of the tensors, as JSON, only when it differs from that of the message before on
the same channel; both ends remember the last.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import torch
from torch import Tensor

from procpipe.tree import Flat, Structure, from_json


class TensorMeta(NamedTuple):
    """Shape and dtype of one tensor, and whether the receiver is to send back a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.dtype.itemsize * math.prod(self.shape)


class Meta(NamedTuple):
    """Everything of a message but the elements of its tensors; fields as in ``Flat``."""

    structure: Structure
    tensors: tuple[TensorMeta, ...]
    memories: tuple[tuple[str, ...], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        """For each tensor, whether a gradient is to be sent back."""
        return tuple(tensor.requires_grad for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors' elements."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def describe(message: Flat) -> Meta:
    """Return the metadata of a message."""
    tensors, structure, flags = message
    return Meta(
        structure,
        tuple(
            TensorMeta(tuple(tensor.shape), tensor.dtype, requires_grad)
            for tensor, requires_grad in zip(tensors, flags, strict=True)
        ),
        message.memories,
        message.changes,
    )


def allocate(meta: Meta, device: torch.device | str) -> list[Tensor]:
    """Allocate the tensors of a message.

    Not as inference tensors, even in inference mode: a message may arrive early and belong to a
    later call that records gradients, which refuses tensors made in inference mode.

    On a GPU integers are zeros: an aborted transfer leaves memory as it is, and kernels queued
    behind it still run. Most integers are indices; one out of range is a fault of the device, after
    which torch's destructors end the process without an error message.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return allocate(meta, device)
    on_gpu = torch.device(device).type == "cuda"
    return [
        (torch.zeros if on_gpu and _is_integer(t.dtype) else torch.empty)(
            t.shape, dtype=t.dtype, device=device
        )
        for t in meta.tensors
    ]


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


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
        [t.shape, str(t.dtype).removeprefix("torch."), t.requires_grad] for t in meta.tensors
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
            tuple(TensorMeta(_shape(s), _dtype(d), bool(flag)) for s, d, flag in tensors),
            tuple(tuple(map(str, names)) for names in memories),
            tuple((str(name), str(where)) for name, where in changes),
        )
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"not the metadata of a message: {data[:80]!r}") from error


def _shape(extents: list[int]) -> tuple[int, ...]:
    if not all(type(extent) is int and extent >= 0 for extent in extents):
        raise TypeError(f"{extents} is not a shape")
    return tuple(extents)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype
