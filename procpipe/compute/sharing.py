"""Tensors that share memory in the plain model, and arrive as tensors of their own.

    stage 0   return x, x[:, :2]        or: yield stash("skip", x); return x
    stage 1   x.relu_()                 the plain model changes both

Between processes each tensor is a copy; within one, autograd does not know that they belong
together. Nothing differs as long as no layer changes one of them in place. So each has the names of
the memories that it shares with others that travel, and whoever changes one notes it:

    others are in the same partition        an error, at once
    another comes to a later partition      an error there, unless it came by way of the change
    all others have been used before        as in the plain model

Knows no transport: names and notes are a part of each message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from procpipe.tree import Flat

__all__ = ["Sharing", "Watch", "check_fresh", "shared"]

#: Of each tensor, the names of the memories that it shares; empty if none does.
Memories = tuple[tuple[str, ...], ...]


class Sharing(NamedTuple):
    """What is told of a message's memory; see ``tree.Flat``."""

    memories: Memories = ()
    changes: tuple[tuple[str, str], ...] = ()


class Watch:
    """Notices which of a partition's inputs that share memory its layers change in place.

    Args:
        tensors: the inputs, as the layers get them.
        sharing: what came with them.
    """

    def __init__(self, tensors: Sequence[Tensor], sharing: Sharing) -> None:
        self._changes = sharing.changes
        self._watched = [
            (tensor, names)
            for tensor, names in zip(tensors, sharing.memories, strict=False)
            if names
        ]
        self._marks = [_mark(tensor) for tensor, _ in self._watched]

    def look(self, where: Callable[[], str]) -> None:
        """Look what a layer has changed; ``where`` names it.

        Raises:
            RuntimeError: what shares the memory is here too.
        """
        for k, (tensor, names) in enumerate(self._watched):
            if _is_as_marked(tensor, self._marks[k]):
                continue
            self._marks[k] = _mark(tensor)
            self._changes += tuple((name, where()) for name in names)
            others = (of for one, (_, of) in enumerate(self._watched) if one != k)
            if any(set(of) & set(names) for of in others):
                raise RuntimeError(
                    f"{where()} changed a tensor in place that shares memory with another that "
                    "enters its partition (a view of it, or the same tensor twice): the plain "
                    "model changes both, but here each is a tensor of its own; make the change "
                    "out of place (x = x + 1 for x.add_(1)), or return a clone()"
                )

    def leaving(self, outputs: Sequence[Tensor], prefix: str) -> Sharing:
        """Return what is to be told of the outputs' memory.

        Args:
            outputs: what leaves for other partitions.
            prefix: begins the names of memories that are shared from here on.
        """
        if len(outputs) == 1 and not self._watched:
            return Sharing((), self._changes)
        return Sharing(shared(outputs, prefix, self._watched), self._changes)


def check_fresh(parts: Sequence[Flat]) -> None:
    """Check that no input of a task misses a change that another one has seen.

    Args:
        parts: the inputs, a message each.

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
    names: list[set[str]] = [set() for _ in tensors]
    for k, tensor in enumerate(tensors):
        for before in range(k):
            if _overlap(tensors[before], tensor):
                for one in (before, k):
                    names[one].add(f"{prefix}/{before}")
        for other, of_other in known:
            if _overlap(other, tensor):
                names[k].update(of_other)
    return tuple(tuple(sorted(of_tensor)) for of_tensor in names) if any(names) else ()


def _mark(tensor: Tensor) -> int | Tensor:
    """Return what tells later whether a tensor was changed."""
    return tensor.clone() if tensor.is_inference() else tensor._version


def _is_as_marked(tensor: Tensor, mark: int | Tensor) -> bool:
    if isinstance(mark, int):
        return tensor._version == mark
    return bool(((tensor == mark) | (tensor.isnan() & mark.isnan())).all())


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have an element in common."""
    if a is b:
        return True
    if not a.numel() or not b.numel():
        return False
    start, other = a.data_ptr(), b.data_ptr()
    if start == other:
        return True
    if start > other:
        a, b, start, other = b, a, other, start
    if other >= start + _extent(a) * a.element_size():
        return False
    apart, rest = divmod(other - start, a.element_size())
    if rest or a.element_size() != b.element_size():
        return True  # views of different dtypes: do not look closer
    return _have_common(tuple(a.shape), a.stride(), tuple(b.shape), b.stride(), apart)


def _extent(tensor: Tensor) -> int:
    """Return the elements from a tensor's first to its last, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@lru_cache(maxsize=256)
def _have_common(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_shape: tuple[int, ...],
    other_strides: tuple[int, ...],
    apart: int,
) -> bool:
    """Tell whether two strided tensors, the second some elements behind, have one in common."""
    is_used = torch.zeros(
        1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)),
        dtype=torch.bool,
        device="cpu",
    )
    is_used.as_strided(shape, strides).fill_(True)
    other = 1 + sum((n - 1) * s for n, s in zip(other_shape, other_strides, strict=True))
    behind = torch.zeros(max(len(is_used), apart + other), dtype=torch.bool, device="cpu")
    behind.as_strided(other_shape, other_strides, apart).fill_(True)
    return bool((is_used & behind[: len(is_used)]).any())
