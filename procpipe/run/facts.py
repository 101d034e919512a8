"""Says where ranks differ in what they must have in common: settings, the model, a scaler.

PURE: no sockets, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def compare_facts(facts: Sequence[Any], numbers: Sequence[int] = range(1 << 62)) -> list[str]:
    """Say where ranks differ from rank 0, one sentence a difference.

    ``facts`` holds each rank's values by name, or what it asks rank 0 to find; ``numbers`` each
    rank's number in the job.
    """
    differences = []
    for rank, theirs in enumerate(facts):
        if isinstance(theirs, str):
            raise ValueError(
                f"rank {numbers[rank]} has arguments by which rank {numbers[0]} finds the "
                f"{theirs}, but rank {numbers[0]} has not: give every rank the same arguments"
            )
        for name, ours in facts[0].items():
            if theirs.get(name) != ours:
                ranks = numbers[0], numbers[rank]
                differences.append(_difference(name, ours, theirs.get(name), *ranks))
    if any(theirs.get("balance") != facts[0].get("balance") for theirs in facts):
        differences.append(_ONE_BALANCE)
    return differences


_ONE_BALANCE = (
    "give every rank the same balance; balance_by_time() and other measurements differ from rank "
    'to rank, so use Stage(model, balance="time", sample=x), or "size": rank 0 measures, and all '
    "ranks use its balance"
)


def _difference(name: str, ours: Any, theirs: Any, first: int, rank: int) -> str:
    if isinstance(ours, list) and isinstance(theirs, list) and name == "layers":
        if len(ours) != len(theirs):
            on_first = f"{len(ours)} layers on rank {first}"
            return f"the model has {on_first} and {len(theirs)} on rank {rank}"
        for a, b in zip(ours, theirs, strict=True):
            if a != b:
                return f"a layer of the model is ({a}) on rank {first} and ({b}) on rank {rank}"
    return f"{name} is {ours!r} on rank {first} and {theirs!r} on rank {rank}"
