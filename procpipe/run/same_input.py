"""Compares the inputs that the ranks of a replica pass to ``stage(input)``.

    rank 0    stage(x) ── checksum of x ──> rank 0 ── faults ──> both, in calls 1, 2, 4, 8, …
    rank 1    stage(x) ── checksum of x ──>

The first rank's input is the one that counts. Where each rank reads a loader of its own, the last
stage computes the loss with the target of another mini-batch: nothing fails, and nothing is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from procpipe.data.remote import Remote
from procpipe.errors import DisagreementError
from procpipe.job.grid import Grid
from procpipe.run.coordinator import Agree
from procpipe.torch_internals import pytree
from procpipe.tree import is_plain

#: The most elements that are mixed at once.
_BLOCK = 2**20

#: Odd factors below 2**63 for a sum that depends on each element and its place.
_OF_PLACE, _OF_VALUE = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9

#: The integers that an element's bytes are viewed as, by its size.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Of each tensor of an input: dtype and shape, and a checksum of its values; plain JSON.
Described = list[list[Any]]


class SameInput:
    """One rank's side of the comparison."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._num_calls = 0

    def check(self, agree: Agree, inputs: Any) -> None:
        """Compare the inputs of a call; every rank makes it, and waits in calls 1, 2, 4, 8, ….

        A rank that passes no tensors, or placeholders, is not compared. ``agree`` brings together
        the values of all ranks.

        Raises:
            DisagreementError: a rank's input is another one; raised on every rank.
        """
        self._num_calls += 1
        n = self._num_calls
        if self._grid.num_stages == 1 or n & (n - 1):
            return
        faults = agree(described(inputs), self._faults)
        if faults:
            raise DisagreementError(faults)

    def _faults(self, of_all: list[Described]) -> list[str]:
        grid, faults = self._grid, []
        for rank, theirs in enumerate(of_all):
            first = rank - rank % grid.num_stages
            if theirs and of_all[first] and theirs != of_all[first]:
                faults.append(
                    f"in call {self._num_calls} of stage(input), {grid.rank_name(rank)} passes "
                    f"another input than {grid.rank_name(first)} "
                    f"({_difference(theirs, of_all[first])}): each of them has read its own data, "
                    "or drawn random numbers of its own, but only the input of "
                    f"{grid.rank_name(first)} counts, so a target on another rank belongs to "
                    "another mini-batch. Read the data with `for … in stage.batches(loader)`, "
                    "which brings the target to the last stage, and change it there at random"
                )
        return faults


def _difference(theirs: Described, first: Described) -> str:
    if len(theirs) != len(first):
        return f"{len(theirs)} tensors instead of {len(first)}"
    pairs = zip(theirs, first, strict=True)
    form, other = next((a[0], b[0]) for a, b in pairs if a != b)
    return f"{form} instead of {other}" if form != other else f"{form} of other values"


def described(inputs: Any) -> Described:
    """Describe the tensors of an input; the empty list if there are none to compare."""
    tensors: list[Tensor] = []
    for leaf in _leaves(inputs):
        if isinstance(leaf, Remote):
            return []
        tensors.append(leaf)
    forms = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors]
    sums = {k: checksum(tensor) for k, tensor in enumerate(tensors) if _has_values(tensor)}
    device = next((each.device for each in sums.values()), None)
    if device is not None:  # the host waits once
        values = torch.stack([each.to(device) for each in sums.values()]).tolist()
        sums = dict(zip(sums, values, strict=True))
    return [[form, sums.get(k)] for k, form in enumerate(forms)]


def _leaves(value: Any) -> Iterator[Tensor | Remote]:
    """Yield tensors and placeholders, from left to right; other values are not compared."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, (Tensor, Remote)):
            yield leaf


def _has_values(tensor: Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not tensor.is_meta
    return is_dense and is_plain(tensor.detach()) and tensor.numel() > 0


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number that depends on every bit of a tensor and its place, the same everywhere.

    Args:
        tensor: of any dtype, shape and strides, with at least one element.

    Returns:
        ``() int64`` on the tensor's device, whose host does not wait for it.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.dtype == torch.complex128:
        flat = torch.view_as_real(flat).reshape(-1)
    integers = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(integers), _BLOCK):
        block = integers[start : start + _BLOCK]
        mixed = torch.arange(start, start + len(block), dtype=torch.int64, device=flat.device)
        mixed.mul_(_OF_PLACE).add_(block)  # integers wrap around, alike on every device
        for shift in (31, 29):  # so that exchanged or compensating changes do not cancel out
            mixed.bitwise_xor_(mixed >> shift).mul_(_OF_VALUE)
        total += mixed.bitwise_xor_(mixed >> 32).sum()
    return total
