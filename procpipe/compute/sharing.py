"""Detects changes in place of tensors that share memory in the plain model only.

    stage 0   return x, x[:, :2]        or: yield stash("skip", x); return x
    stage 1   x.relu_()                 the plain model changes both

Between processes each tensor is a copy; within one, they enter autograd's graph apart. Nothing
differs unless a layer changes one of them in place. So each tensor carries the names of the
memories that it shares, and a partition whose layers change it adds these names to its messages:

    others are in the same partition        an error, at once
    another arrives in a later partition    an error there, unless it carries the change too
    all others have been used before        as in the plain model
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from procpipe.tree import Flat

#: Of each tensor, the names of the memories that it shares; empty if none does.
Memories = tuple[tuple[str, ...], ...]


class Sharing(NamedTuple):
    """The memories and changes of a message, as in ``tree.Flat``."""

    memories: Memories = ()
    changes: tuple[tuple[str, str], ...] = ()


class SharedInputs:
    """Detects which of a partition's inputs that share memory its layers change in place."""

    def __init__(self, tensors: Sequence[Tensor], sharing: Sharing) -> None:
        self._changes = sharing.changes
        self._inputs = [pair for pair in zip(tensors, sharing.memories, strict=False) if pair[1]]
        self._marks = [_mark(tensor) for tensor, _ in self._inputs]

    @property
    def is_needed(self) -> bool:
        """Whether any of the inputs shares memory."""
        return bool(self._inputs)

    def look(self, where: Callable[[], str]) -> None:
        """Record what a layer has changed; ``where`` names it.

        Raises:
            RuntimeError: another input of this partition shares the memory.
        """
        for k, (tensor, names) in enumerate(self._inputs):
            if _is_as_marked(tensor, self._marks[k]):
                continue
            self._marks[k] = _mark(tensor)
            self._changes += tuple((name, where()) for name in names)
            others = (of for one, (_, of) in enumerate(self._inputs) if one != k)
            if any(set(of) & set(names) for of in others):
                raise RuntimeError(
                    f"{where()} changed a tensor in place that shares memory with another that "
                    "enters its partition (a view of it, or the same tensor twice): the plain "
                    "model changes both, but here each is a tensor of its own; make the change "
                    "out of place (x = x + 1 for x.add_(1)), or return a clone()"
                )

    def leaving(self, outputs: Sequence[Tensor], prefix: str) -> Sharing:
        """Return the memories of outputs, new ones named by a prefix, and all changes so far."""
        if len(outputs) == 1 and not self._inputs:
            return Sharing((), self._changes)
        return Sharing(shared(outputs, prefix, self._inputs), self._changes)


def check_fresh(parts: Sequence[Flat]) -> None:
    """Check that no input of a task lacks a change that another carries.

    Raises:
        RuntimeError: one does.
    """
    known = {change for part in parts for change in part.changes}
    for part in parts if known else ():
        missed = known.difference(part.changes)
        names = {name for of_tensor in part.memories for name in of_tensor}
        for name, where in sorted(missed):
            if name in names:
                raise RuntimeError(
                    f"{where} changed a tensor in place that shares memory with a skip tensor "
                    "which is popped later: the plain model changes both, but the skip tensor is "
                    "on its way already; make the change out of place (nn.ReLU() for "
                    "nn.ReLU(inplace=True)), or stash a clone()"
                )


def shared(
    tensors: Sequence[Tensor],
    prefix: str,
    known: Sequence[tuple[Tensor, tuple[str, ...]]] = (),
) -> Memories:
    """Return the names of the memories that each tensor shares with others, or with known ones."""
    if len(tensors) + len(known) < 2:
        return ()
    names: list[set[str]] = [set() for _ in tensors]
    for a, b in _overlapping([*tensors, *(tensor for tensor, _ in known)]):
        if b < len(tensors):
            names[a].add(f"{prefix}/{a}")
            names[b].add(f"{prefix}/{a}")
        elif a < len(tensors):
            names[a].update(known[b - len(tensors)][1])
    return tuple(tuple(sorted(of_tensor)) for of_tensor in names) if any(names) else ()


def are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same values; NaN equals NaN here."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _mark(tensor: Tensor) -> int | Tensor:
    return tensor.clone() if tensor.is_inference() else tensor._version


def _is_as_marked(tensor: Tensor, mark: int | Tensor) -> bool:
    if isinstance(mark, int):
        return tensor._version == mark
    return are_same(tensor, mark)


def _overlapping(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the indices of each two tensors that share an element, the lower first."""
    by_start = sorted(
        (tensor.data_ptr(), k)
        for k, tensor in enumerate(tensors)
        if tensor.layout == torch.strided and tensor.numel()
    )
    before: list[tuple[int, int]] = []  # where each ends, and its index
    for start, k in by_start:
        before = [(end, one) for end, one in before if end > start]
        for _, one in before:
            if _overlap(tensors[one], tensors[k]):
                yield min(one, k), max(one, k)
        size = tensors[k].element_size()
        before.append((start + size * _extent(_dimensions(tensors[k])), k))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors, the second of which starts in the first, share an element."""
    apart, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if rest or a.element_size() != b.element_size():
        return True  # views of different dtypes: taken to overlap
    return apart == 0 or _have_common(_dimensions(a), _dimensions(b), apart)


#: Strides and sizes of a tensor's dimensions, the largest stride first.
_Dimensions = tuple[tuple[int, int], ...]


def _dimensions(tensor: Tensor) -> _Dimensions:
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(sorted((pair for pair in pairs if pair[0] and pair[1] > 1), reverse=True))


def _extent(dimensions: _Dimensions) -> int:
    """Return the elements from a tensor's first to its last, both included."""
    return 1 + sum((size - 1) * stride for stride, size in dimensions)


@lru_cache(maxsize=256)
def _have_common(one: _Dimensions, other: _Dimensions, apart: int) -> bool:
    """Return whether two strided tensors, the second ``apart`` elements later, share an element."""
    while one and other and one[0] == other[0]:
        stride = one[0][0]
        if max(_extent(one[1:]), apart + _extent(other[1:])) > stride:
            break
        one, other = one[1:], other[1:]  # rows do not overlap: the first ones are enough
    length = _extent(one)
    if apart >= length:
        return False
    if math.prod(size for _, size in one) == length:
        return True  # the first has all elements between its ends
    is_used = torch.zeros(max(length, apart + _extent(other)), dtype=torch.bool, device="cpu")
    behind = torch.zeros_like(is_used)
    for flags, dimensions, start in ((is_used, one, 0), (behind, other, apart)):
        sizes, strides = [n for _, n in dimensions], [s for s, _ in dimensions]
        flags.as_strided(sizes, strides, start).fill_(True)
    return bool((is_used & behind).any())
