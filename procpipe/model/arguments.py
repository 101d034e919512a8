"""Checks the arguments of a ``Stage`` other than model and balance, which ``cut.py`` checks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from procpipe.errors import BalanceError
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import Schedule


def checked_chunks(chunks: int) -> int:
    """Return the number of micro-batches.

    Raises:
        TypeError: not an int.
        ValueError: less than 1.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"chunks must be an int, not {chunks!r}")
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}, but a mini-batch has at least 1 micro-batch")
    return chunks


def checked_checkpoint(checkpoint: str) -> str:
    """Return the name of what is recomputed.

    Raises:
        TypeError: not a str.
        ValueError: not one of the names.
    """
    if not isinstance(checkpoint, str):
        raise TypeError(f"checkpoint is {checkpoint!r}, but must be a str")
    recomputed(checkpoint, 1)
    return checkpoint


def checked_replicas(
    replicas: int, num_ranks: int, num_stages: int | None, *, is_launched: bool
) -> int:
    """Return the number of replicas.

    Args:
        replicas: as the user gave it.
        num_ranks: the processes that there are.
        num_stages: how many stages the balance makes, if that is known.
        is_launched: False for a script without a launcher, which is one stage of one replica.

    Raises:
        TypeError: not an int.
        ValueError: less than 1.
        BalanceError: the processes cannot be divided into so many replicas.
    """
    if isinstance(replicas, bool) or not isinstance(replicas, int):
        raise TypeError(f"replicas is {replicas!r}, but must be an int")
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}, but there is at least 1")
    if not is_launched or num_ranks % replicas == 0:
        return replicas
    fitting = -(-num_ranks // replicas) * replicas
    others = [r for r in range(1, num_ranks + 1) if num_ranks % r == 0]
    what = "a multiple of the replicas"
    if num_stages:
        fitting, others = num_stages * replicas, [r for r in others if num_ranks // r == num_stages]
        what = f"{fitting}, for {num_stages} stages"
    instead = f", or give replicas={' or '.join(map(str, others))}" if others else ""
    raise BalanceError(
        f"replicas={replicas}, but there are {num_ranks} processes: their number is that of stages "
        f"times replicas, so start {what} (torchrun --nproc_per_node={fitting}){instead}"
    )


def checked_transport(name: str | None, names: Collection[str]) -> str | None:
    """Return the name of a transport, or None for the best.

    Raises:
        ValueError: not one of ``names``.
    """
    if name not in (None, *names):
        listed = ", ".join(map(repr, names))
        raise ValueError(f"transport is {name!r}, but must be one of {listed}, or left out")
    return name


def checked_limits(
    limits: int | Sequence[int] | None, num_stages: int, schedule: Schedule, *, is_launched: bool
) -> list[int] | None:
    """Return the limit of each stage, from what the user gave as ``memory_limit_bytes``.

    Args:
        limits: one for every stage, or one each.
        num_stages: how many there are.
        schedule: must be one that can keep to limits.
        is_launched: False for a script without a launcher, whose one stage is all of them.

    Raises:
        TypeError: neither an int nor a sequence of ints.
        ValueError: not positive, not one for each stage, or another schedule than ``"auto"``.
    """
    if limits is None:
        return None
    if not schedule.is_measured:
        raise ValueError(
            f"memory_limit_bytes is {limits!r}, but only schedule='auto' can keep to a limit"
        )
    wrong = f"memory_limit_bytes is {limits!r}, but must be an int, or a sequence of one each stage"
    if not isinstance(limits, (int, Sequence)):
        raise TypeError(wrong)
    found = [limits] * num_stages if isinstance(limits, int) else list(limits)
    if any(isinstance(limit, bool) or not isinstance(limit, int) for limit in found):
        raise TypeError(wrong)
    if any(limit < 1 for limit in found):
        raise ValueError(f"memory_limit_bytes is {limits!r}, but a stage holds at least 1 byte")
    if not is_launched and not isinstance(limits, int):
        return [sum(found)]
    if len(found) != num_stages:
        raise ValueError(
            f"memory_limit_bytes has {len(found)} limits, but there are {num_stages} stages: give "
            "one each, or one for all"
        )
    return found
