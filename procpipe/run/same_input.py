"""Compares what ranks have read: alike within a replica, each its own between replicas.

    within, in calls 1, 2, 4, 8, … of stage(input)      between, in the first item of a loop

    rank 0    stage(x) ── checksum ──┐                  rank 0    x of batches ── checksum ──┐
    rank 1    stage(x) ── checksum ──┴─> the same?      rank 2    x of batches ── checksum ──┴─> no?

The first rank's input is the one that counts. Where each rank reads a loader of its own, the last
stage computes the loss with the target of another mini-batch: nothing fails, and nothing is learnt.
Where replicas read the same, each sample counts twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from procpipe.channel.meta import memory_of
from procpipe.data.remote import Remote
from procpipe.errors import CallMismatchError, DisagreementError
from procpipe.job.grid import Grid
from procpipe.run.coordinator import Agree
from procpipe.torch_internals import pytree
from procpipe.tree import in_words, is_dense


def described(inputs: Any) -> list[Any] | None:
    """Describe an input's tensors, and a checksum of their bits; None if there is none to compare.

    Plain JSON. Waits for the tensors' device.
    """
    leaves = pytree.tree_leaves(inputs)
    if any(isinstance(leaf, Remote) for leaf in leaves):
        return None
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    having_bits = [tensor for tensor in tensors if is_dense(tensor) and tensor.numel()]
    checksum = 0
    for tensor in having_bits:
        on_cpu = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        checksum = zlib.crc32(memory_of(on_cpu), checksum)
    return [", ".join(map(in_words, tensors)), checksum] if having_bits else None


def check_same(inputs: Any, num_calls: int, grid: Grid, agree: Agree) -> None:
    """Compare the inputs of ``stage(input)``; every rank waits in calls 1, 2, 4, 8, ….

    Raises:
        DisagreementError: a rank's is another than its replica's first; raised on every rank.
    """
    if grid.num_stages == 1 or num_calls.bit_count() != 1:
        return
    if faults := agree(described(inputs), partial(_differences, grid, num_calls)):
        raise DisagreementError(faults)


def _differences(grid: Grid, num_calls: int, of_all: Sequence[Any]) -> list[str]:
    """Say whose input is another than its replica's first; ``of_all`` has each ``described``."""
    faults = []
    for rank, theirs in enumerate(of_all):
        first = rank - rank % grid.num_stages
        expected = of_all[first]
        if theirs is None or expected in (None, theirs):
            continue
        how = "of other values" if theirs[0] == expected[0] else f"instead of {expected[0]}"
        faults.append(
            f"in call {num_calls} of stage(input), {grid.rank_name(rank)} passes another input "
            f"than {grid.rank_name(first)} ({theirs[0]} {how}): each of them has read its own "
            "data, or drawn random numbers of its own, but only the input of "
            f"{grid.rank_name(first)} counts, so a target on another rank belongs to another "
            "mini-batch. Read the data with `for … in stage.batches(loader)`, which brings the "
            "target to the last stage, and change it there at random"
        )
    return faults


def check_apart(of_replicas: Sequence[Any], grid: Grid) -> None:
    """Check that no replica has read the same as another.

    ``of_replicas`` has what :func:`described` returned on their first ranks; None if that is not to
    be compared.

    Raises:
        CallMismatchError: two have.
    """
    first: dict[str, int] = {}
    for rank, read in zip(grid.same_stage(), of_replicas, strict=False):
        if read is not None and (other := first.setdefault(repr(read), rank)) != rank:
            raise CallMismatchError(
                f"{grid.rank_name(rank)} reads the same first mini-batch in training as "
                f"{grid.rank_name(other)}, so it would count twice: let each replica read data of "
                "its own, by DistributedSampler(dataset, stage.replicas, stage.replica), or give "
                "batches(…, same_data=True) if that is meant"
            )
