"""A balance by name: rank 0 profiles the model, and every rank takes what it found.

rank 0      sample ── first micro-batch ── profile ── optimal blocks ──┐
others                                                                  └──> balance
"""

from __future__ import annotations

from typing import Any

from torch import nn

from procpipe.balance import Inputs, balance_by_size, balance_by_time
from procpipe.data.microbatch import scatter
from procpipe.errors import BalanceError
from procpipe.job.world import World
from procpipe.run.coordinator import Agree


def agreed_balance(
    kind: str,
    module: nn.Sequential,
    sample: Any,
    chunks: int,
    world: World,
    agree: Agree,
    num_partitions: int,
) -> list[int]:
    """Find a balance on rank 0; every rank calls it, and the others wait.

    Args:
        kind: "time" or "size".
        module: the full model.
        sample: on rank 0, a mini-batch of the size that training will have: the model's input,
            ``balance.Inputs`` of several, or a dict of its named ones.
        chunks: micro-batches in a mini-batch.
        world: this process's place in the job.
        agree: joins rank 0 and the others.
        num_partitions: the number of partitions.

    Raises:
        BalanceError: another kind, no sample on rank 0, or fewer layers than partitions.
    """
    if kind not in ("time", "size"):
        raise BalanceError(
            f"balance is {kind!r}: give the number of layers in each stage, or 'time' or 'size' to "
            "have it found from a sample"
        )
    if not world.is_launched:
        return [len(module)]

    def combine(asked: list[Any]) -> list[int]:
        for rank, theirs in zip(world.grid.numbers, asked, strict=False):
            if theirs != "balance":  # it is given there: these are its facts, see compare_facts
                raise BalanceError(
                    f"rank {world.grid.numbers[0]} has arguments by which it finds the balance, "
                    f"but rank {rank} has not: give every rank the same arguments"
                )
        return _found(kind, module, sample, chunks, world, num_partitions)

    found: list[int] = agree("balance", combine)
    return found


def _found(
    kind: str, module: nn.Sequential, sample: Any, chunks: int, world: World, num_partitions: int
) -> list[int]:
    if sample is None:
        raise BalanceError(
            f"balance={kind!r} needs a sample on rank 0: Stage(model, balance={kind!r}, sample=x), "
            "where x is an input as for training"
        )
    inputs = Inputs.of(sample, module)
    values, named = scatter((inputs.values, inputs.named), chunks)[0][0]
    first = Inputs(*values, **named)
    find = balance_by_time if kind == "time" else balance_by_size
    return find(num_partitions, module, first, device=world.device)
