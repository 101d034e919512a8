"""Scatters a mini-batch over micro-batches, and gathers the outputs of micro-batches.

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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from procpipe.containers import USABLE, Container, opened
from procpipe.errors import BoundaryError
from procpipe.tree import PLAIN_TYPES


class NoChunk:
    """Wraps a tensor that is not scattered: every micro-batch is given the whole of it.

    Args:
        tensor: of any shape and dtype; its dim 0 need not be the batch.

    Raises:
        TypeError: it is not a tensor (anything else is never scattered, so needs no wrapping).

    Source:
        ``NoChunk`` of ``torch.distributed.pipeline.sync``, the name its users know.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"NoChunk wraps a tensor, not a {type(tensor).__qualname__}: pass the value as it "
                "is, since only tensors are scattered"
            )
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"NoChunk({self.tensor!r})"


def scatter(inputs: Any, chunks: int) -> tuple[list[Any], list[int]]:
    """Return the inputs of each of at most ``chunks`` micro-batches, and their sizes.

    Inputs are a tuple, or a dict by position and name, of nested tensors ``(batch, …)``, which
    become views; ``NoChunk`` tensors and plain values are repeated.

    Raises:
        TypeError: there is no tensor to scatter, or a value of another type (``BoundaryError``).
        ValueError: a tensor without dimensions, tensors of different batch size, or an empty batch.
    """
    if type(inputs) is tuple and len(inputs) == 1:
        (only,) = inputs
        if isinstance(only, Tensor) and only.dim() and len(only):
            parts = only.chunk(chunks)
            return [(part,) for part in parts], [len(part) for part in parts]
    sizes = _sizes(_batch_size(inputs), chunks)
    return _divide(inputs, sizes), sizes


def scatter_twice(inputs: Any, num_shares: int, chunks: int) -> list[tuple[list[Any], list[int]]]:
    """Divide inputs into shares, and each into at most ``chunks`` micro-batches.

    Takes and raises what :func:`scatter` does, and returns the same for each share. A batch smaller
    than the number of shares leaves the last of them empty.
    """
    shares = [_sizes(size, chunks) for size in _sizes(_batch_size(inputs), num_shares)]
    parts = iter(_divide(inputs, [size for sizes in shares for size in sizes]))
    found = [([next(parts) for _ in sizes], sizes) for sizes in shares]
    return found + [([], [])] * (num_shares - len(found))


def scatter_like(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a target's part for each micro-batch, by the sizes that :func:`scatter` returned.

    The target may hold no tensor at all, or be ``None``.

    Raises:
        BoundaryError: the target holds an object of another type.
        ValueError: a tensor without dimensions, or with another batch size than the inputs.
    """
    for where, tensor in _tensors_to_split(target, "target"):
        if (found := _num_samples(tensor, where)) != sum(sizes):
            raise _other_size(where, found, "the input", sum(sizes))
    return _divide(target, sizes)


def gather(outputs: list[Any]) -> Any:
    """Join the nested outputs of the micro-batches, differentiably; a single one stays as it is.

    Tensors ``(batch/m, …)`` are concatenated to ``(batch, …)``, tensors ``()`` stacked to ``(m,)``;
    ``None`` stays where all are ``None``, and other values become a list of ``m``.

    Raises:
        ValueError: the micro-batches' outputs are built differently.
        BoundaryError: an output holds an object of another type.
    """
    if len(outputs) == 1:
        return outputs[0]
    return _merge(outputs, "output")


def _batch_size(inputs: Any) -> int:
    tensors = _tensors_to_split(inputs, "input")
    first = next(tensors, None)
    if first is None:
        raise TypeError(
            "the input holds no tensor to scatter over micro-batches: pass at least one "
            "tensor with the batch in dim 0 that is not wrapped in NoChunk"
        )
    first_where, first_tensor = first
    batch_size = _num_samples(first_tensor, first_where)
    for where, tensor in tensors:
        if (found := _num_samples(tensor, where)) != batch_size:
            raise _other_size(first_where, batch_size, where, found)
    if batch_size == 0:
        raise ValueError(
            f"the batch is empty ({first_where} has shape {tuple(first_tensor.shape)}): pass at "
            "least one sample, or skip this mini-batch on every rank"
        )
    return batch_size


def _num_samples(tensor: Tensor, where: str) -> int:
    if tensor.dim() == 0:
        raise ValueError(
            f"{where} is a tensor without dimensions, which cannot be scattered over "
            "micro-batches: wrap it in NoChunk to give it whole to each"
        )
    return len(tensor)


def _other_size(where: str, size: int, other: str, other_size: int) -> ValueError:
    return ValueError(
        f"{where} has {size} samples but {other} has {other_size}: give both the same size of dim "
        "0, or wrap a tensor that is not to be scattered in NoChunk"
    )


def _sizes(batch_size: int, chunks: int) -> list[int]:
    """Return the sizes that ``torch.chunk`` gives: all equal but for the last."""
    step = math.ceil(batch_size / chunks)
    return [min(step, batch_size - start) for start in range(0, batch_size, step)]


def _opened(value: Any, where: str) -> Container | None:
    """Take a container apart; return None for a tensor, ``NoChunk`` or plain value."""
    if isinstance(value, Tensor) or type(value) in (NoChunk, *PLAIN_TYPES):
        return None
    container = opened(value, where)
    if container is None:
        raise _unknown_type(value, where)
    return container


def _tensors_to_split(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif (container := _opened(value, where)) is not None:
        for label, child in zip(container.labels, container.children, strict=True):
            yield from _tensors_to_split(child, where + label)


def _divide(value: Any, sizes: Sequence[int]) -> list[Any]:
    if isinstance(value, Tensor):
        return list(torch.split(value, list(sizes)))
    if (container := _opened(value, "a value")) is not None:
        children = [_divide(child, sizes) for child in container.children]
        return [container.like([parts[i] for parts in children]) for i in range(len(sizes))]
    repeated = value.tensor if type(value) is NoChunk else value
    return [repeated for _ in sizes]


def _merge(values: list[Any], where: str) -> Any:
    containers, forms = [], []
    for value in values:
        if type(value) is NoChunk:
            raise _unknown_type(value, where)
        containers.append(container := _opened(value, where))
        plain = "a tensor" if isinstance(value, Tensor) else "a plain value"
        forms.append(container.in_words if container else plain)
        if forms[-1] != forms[0]:
            raise ValueError(
                f"{where} is {forms[0]} in micro-batch 0 but {forms[-1]} in micro-batch "
                f"{len(forms) - 1}: let the last stage build its output alike for every micro-batch"
            )
    if isinstance(values[0], Tensor):
        return torch.cat(values) if values[0].dim() else torch.stack(values)
    if (first := containers[0]) is None:
        return None if all(value is None for value in values) else values
    by_label = [dict(zip(each.labels, each.children, strict=True)) for each in containers if each]
    return first.like(
        [_merge([each[label] for each in by_label], where + label) for label in first.labels]
    )


def _unknown_type(value: Any, where: str) -> BoundaryError:
    of = type(value)
    return BoundaryError(
        f"{where} is a {of.__module__}.{of.__qualname__}, which micro-batches cannot carry: "
        f"use NoChunk, {USABLE}"
    )
