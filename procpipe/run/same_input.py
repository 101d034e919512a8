"""Compares the inputs that the ranks of a replica pass to ``stage(input)``.

    rank 0    stage(x) ── checksum of x ──> rank 0 ── faults ──> both, in calls 1, 2, 4, 8, …
    rank 1    stage(x) ── checksum of x ──>

The first rank's input is the one that counts. Where each rank reads a loader of its own, the last
stage computes the loss with the target of another mini-batch: nothing fails, and nothing is learnt.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from procpipe.channel.meta import memory_of
from procpipe.data.remote import Remote
from procpipe.errors import DisagreementError
from procpipe.job.grid import Grid
from procpipe.run.coordinator import Agree
from procpipe.torch_internals import pytree
from procpipe.tree import is_plain

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
    leaves = pytree.tree_leaves(inputs)
    if any(isinstance(leaf, Remote) for leaf in leaves):
        return []
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    return [
        [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}", checksum(tensor)]
        for tensor in tensors
    ]


@torch.no_grad()
def checksum(tensor: Tensor) -> int | None:
    """Return a number that depends on every bit of a detached tensor and its place.

    None if it has no values of its own (a sparse one, say). Waits for the tensor's device.
    """
    if (
        tensor.layout != torch.strided
        or tensor.is_meta
        or not (is_plain(tensor) and tensor.numel())
    ):
        return None
    return zlib.crc32(memory_of(tensor.cpu().resolve_conj().resolve_neg().contiguous()))
