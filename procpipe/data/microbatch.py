"""Scatters a mini-batch over micro-batches, and gathers their outputs; brings tensors to a device.

Sizes are those of ``torch.chunk``: a batch of 10 in 4 chunks makes 3 + 3 + 3 + 1, and a batch
smaller than ``chunks`` makes fewer micro-batches. So their number and sizes may change with every
mini-batch.

    (x, [mask, NoChunk(table)], 0.5)        x and mask of 10 rows, table of any shape
        │ scatter, chunks=4
        ├── (x[0:3], [mask[0:3], table], 0.5)
        ├── (x[3:6], [mask[3:6], table], 0.5)
        ├── (x[6:9], [mask[6:9], table], 0.5)
        └── (x[9:],  [mask[9:],  table], 0.5)       sizes [3, 3, 3, 1]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from procpipe.torch_internals import pytree
from procpipe.tree import Structure, check_leaves, flatten, in_words, map_tensors, place_of


@dataclass(eq=False, slots=True)
class NoChunk:
    """Wraps a tensor that is not scattered: every micro-batch is given the whole of it.

    Args:
        tensor: of any shape and dtype; its dim 0 need not be the batch.

    Source:
        ``NoChunk`` of ``torch.distributed.pipeline.sync``, the name its users know.
    """

    tensor: Tensor


# So a target that has one travels.
pytree.register_dataclass(NoChunk, serialized_type_name="procpipe.NoChunk")


def _is_whole(value: Any) -> bool:
    return type(value) is NoChunk


def checked_chunks(chunks: int) -> int:
    """Return the number of micro-batches; ``TypeError`` or ``ValueError`` if it is none."""
    if not isinstance(chunks, int):
        raise TypeError(f"chunks must be an int, not {chunks!r}")
    if chunks < 1:
        raise ValueError(
            f"chunks is {chunks}, but a mini-batch has at least 1 micro-batch: give 1 or more"
        )
    return chunks


def scatter(inputs: Any, chunks: int) -> tuple[list[list[Tensor]], Structure, list[int]]:
    """Divide inputs over at most ``chunks`` micro-batches.

    Inputs are a tuple, or a dict by position and name, of nested tensors ``(batch, …)``, which
    become views; ``NoChunk`` tensors and plain values are repeated.

    Returns:
        Each micro-batch's tensors, the structure that they are in, and the micro-batches' sizes.

    Raises:
        TypeError: there is no tensor to scatter, or a value of another type (``BoundaryError``).
        ValueError: a tensor without dimensions, tensors of different batch size, or an empty batch.
    """
    leaves, join = _opened(inputs)
    batch_size = _num_samples(inputs, leaves, "input")
    if batch_size is None:
        raise TypeError(
            "the input holds no tensor to scatter over micro-batches: pass at least one "
            "tensor with the batch in dim 0 that is not wrapped in NoChunk"
        )
    if batch_size == 0:
        raise ValueError(
            f"the batch is empty (the input is {in_words(inputs)}): pass at least one sample, or "
            "skip this mini-batch on every rank"
        )
    step = math.ceil(batch_size / checked_chunks(chunks))
    sizes = [min(step, batch_size - start) for start in range(0, batch_size, step)]
    rows = _divided(leaves, sizes)
    _, structure = flatten(join(rows[0]))
    return [[leaf for leaf in row if isinstance(leaf, Tensor)] for row in rows], structure, sizes


def scatter_like(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a target's part for each micro-batch, by the sizes that :func:`scatter` returned.

    The target may hold no tensor at all, or be ``None``.

    Raises:
        BoundaryError: the target holds an object of another type.
        ValueError: a tensor without dimensions, or with another batch size than the inputs.
    """
    leaves, join = _opened(target)
    _num_samples(target, leaves, "target", sum(sizes), "the input")
    return list(map(join, _divided(leaves, sizes)))


def gather(outputs: list[Any]) -> Any:
    """Join the nested outputs of the micro-batches, differentiably; a single one stays as it is.

    Tensors ``(batch/m, …)`` are concatenated to ``(batch, …)``, tensors ``()`` stacked to ``(m,)``;
    ``None`` stays where all are ``None``, and other values become a list of ``m``.

    Raises:
        ValueError: the micro-batches' outputs are built differently.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    forms = [
        (spec, [isinstance(leaf, Tensor) for leaf in leaves])
        for leaves, spec in zip(flat, specs, strict=True)
    ]
    for i, output in enumerate(outputs):
        if forms[i] != forms[0]:
            raise ValueError(
                f"the output is {in_words(outputs[0])} in micro-batch 0 but {in_words(output)} "
                f"in micro-batch {i}: let the last stage build its output alike for every "
                "micro-batch"
            )
    return pytree.tree_unflatten(map(_merged, zip(*flat, strict=True)), specs[0])


def _opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a value, and what makes such a value of others; first what is usual."""
    if isinstance(value, Tensor):
        return [value], itemgetter(0)
    if type(value) is tuple and all(isinstance(each, Tensor) for each in value):
        return list(value), tuple
    leaves, spec = pytree.tree_flatten(value, is_leaf=_is_whole)
    return leaves, partial(pytree.tree_unflatten, treespec=spec)


def _num_samples(
    value: Any, leaves: Sequence[Any], where: str, size: int | None = None, other: str = ""
) -> int | None:
    """Return how many samples a value's tensors have; None if it holds none to be divided.

    ``where`` names the value. If ``size`` is given, these must have as many, as ``other`` has.
    """
    check_leaves(value, leaves, where, others=(NoChunk,))
    first = 0  # of those that are divided
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.dim() == 0:
            raise ValueError(
                f"{where}{place_of(value, k)} is a tensor without dimensions, which cannot be "
                "scattered over micro-batches: wrap it in NoChunk to give it whole to each"
            )
        if size is None:
            size, first = len(leaf), k
        elif len(leaf) != size:
            other = other or where + place_of(value, first)
            raise ValueError(
                f"{other} has {size} samples but {where}{place_of(value, k)} has {len(leaf)}: give "
                "both the same size of dim 0, or wrap a tensor that is not to be scattered in "
                "NoChunk"
            )
    return size


def _divided(leaves: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Return each micro-batch's leaves."""
    parts = [_parts_of(leaf, sizes) for leaf in leaves]
    return [[part[i] for part in parts] for i in range(len(sizes))]


def _parts_of(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(leaf, Tensor):
        return torch.split(leaf, list(sizes))
    return [leaf.tensor if type(leaf) is NoChunk else leaf] * len(sizes)


def _merged(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves)
    return None if all(leaf is None for leaf in leaves) else list(leaves)


def on_device(value: Any, device: torch.device, where: str = "") -> Any:
    """Return a nested value with its tensors on a device; the host waits for no device."""
    if isinstance(value, Tensor):
        return uploaded(value, device)
    return map_tensors(lambda tensor: uploaded(tensor, device), value, where)


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, as ``tensor.to(device)``; does not wait for the device.

    A copy from ordinary memory waits for all work queued on the stream. One from pinned memory does
    not, but that memory must not change until the device has read it, and a user may fill it with
    the next mini-batch. So a tensor is first copied into pinned memory of torch's allocator, which
    reuses it once the device has read it:

        user's tensor ── host copies ──> pinned memory ══ the device copies, later ══> GPU
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor.to(device)
    pinned = torch.empty_like(tensor, memory_format=torch.preserve_format, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)
