"""The named schedules: each makes a placement, and a plan for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from procpipe.errors import BalanceError, PlanError
from procpipe.plan.placement import folded, looped
from procpipe.plan.schedules.fuse import fused
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.plan.schedules.interleaved import interleaved
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.zero_bubble import zb_h1, zb_v
from procpipe.plan.task import Plan

#: Plans a whole mini-batch: number of micro-batches, placement, micro-batches to recompute.
PlanAt = Callable[[int, tuple[int, ...], Collection[int]], Plan]


@dataclass(frozen=True)
class Schedule:
    """A way to run mini-batches of any number of micro-batches on any number of stages."""

    name: str  # its name for users
    plan: PlanAt  # plans a mini-batch
    #: Returns the stage of each partition, from the numbers of partitions and stages.
    placement: Callable[[int, int], tuple[int, ...]] = looped
    partitions_per_stage: int | None = 1  # the only number that it supports; None for any number
    #: Returns the default number of partitions, from the number of stages.
    count: Callable[[int], int] = lambda num_stages: num_stages

    def place(self, num_partitions: int, num_stages: int) -> tuple[int, ...]:
        """Return the stage of each partition.

        Raises:
            BalanceError: the schedule does not support this number of partitions a stage.
        """
        if num_partitions == 1:
            return (0,)
        v, rest = divmod(num_partitions, num_stages)
        if rest or v < 1 or self.partitions_per_stage not in (None, v):
            wanted = {1: "one partition", 2: "two partitions"}.get(
                self.partitions_per_stage or 0, "the same number of partitions, one or more,"
            )
            raise BalanceError(
                f"the balance makes {num_partitions} partitions for {num_stages} stages, but "
                f"schedule={self.name!r} needs {wanted} for each"
            )
        return self.placement(num_partitions, num_stages)


def _twice(num_stages: int) -> int:
    return 2 * num_stages


def _at(make: Callable[..., Plan], *, is_split: bool = False) -> PlanAt:
    """Turn a schedule of ``(m, n, recompute=…)`` into one of a placement.

    Args:
        make: the schedule.
        is_split: whether it splits backward. ``I`` and ``W`` are then joined where this costs no
            time if all tasks take equally long.
    """

    def plan_at(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
        plan = make(m, max(placement) + 1, recompute=recompute)
        return fused(plan) if is_split else plan

    return plan_at


def _interleaved(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
    n = max(placement) + 1
    return interleaved(m, n, len(placement) // n, recompute=recompute)


def _zb_v(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
    make = zb_h1 if len(placement) == 1 else zb_v  # one stage has the whole model
    return _at(make, is_split=True)(m, placement, recompute)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", _at(gpipe)),
        Schedule("1f1b", _at(one_f_one_b)),
        Schedule("interleaved", _interleaved, partitions_per_stage=None, count=_twice),
        Schedule("zb-h1", _at(zb_h1, is_split=True)),
        Schedule("zb-v", _zb_v, placement=folded, partitions_per_stage=2, count=_twice),
    )
}


def schedule_of(schedule: str | Callable[[int, int], Plan]) -> Schedule:
    """Return the schedule of a name or of a user's function.

    Args:
        schedule: a name in ``SCHEDULES``, or a function of the numbers of micro-batches and of
            stages, whose plans include recomputations and a placement.

    Raises:
        ValueError: the name is unknown.
        TypeError: neither a name nor a function.
    """
    if callable(schedule):
        return _of_function(schedule)
    if not isinstance(schedule, str):
        raise TypeError(f"schedule is {schedule!r}, but must be a str or a function (m, n) -> Plan")
    if schedule not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule is {schedule!r}, but must be one of {names}, or a function")
    return SCHEDULES[schedule]


def _of_function(function: Callable[[int, int], Plan]) -> Schedule:
    def planned(m: int, n: int) -> Plan:
        plan = function(m, n)
        if not isinstance(plan, Plan):
            raise TypeError(
                f"schedule({m}, {n}) returned {plan!r}, but must return a procpipe.plan.task.Plan"
            )
        if (plan.num_micro_batches, plan.num_stages) != (m, n):
            raise PlanError(
                [
                    f"schedule({m}, {n}) returned a plan of {plan.num_micro_batches} micro-batches "
                    f"and {plan.num_stages} stages"
                ]
            )
        for name, is_there in (("forward", plan.has_forward), ("backward", plan.has_backward)):
            if not is_there:
                raise PlanError([f"schedule({m}, {n}) returned a plan without {name} tasks"])
        return plan

    def plan_at(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
        n = max(placement) + 1
        plan = planned(m, n)
        if n == 1 and len(placement) < plan.num_partitions:  # one stage has the whole model
            return one_f_one_b(m, 1, recompute=recompute)
        if plan.placement != placement:
            raise PlanError(
                [
                    f"schedule({m}, {n}) returned a plan with the placement "
                    f"{list(plan.placement)}, but for one micro-batch it was {list(placement)}, "
                    "by which the layers have been placed"
                ]
            )
        return plan

    def placement(num_partitions: int, num_stages: int) -> tuple[int, ...]:
        wanted = planned(1, num_stages).placement
        if len(wanted) != num_partitions:
            raise BalanceError(
                f"the balance makes {num_partitions} partitions, but the plan of "
                f"schedule(1, {num_stages}) has {len(wanted)}"
            )
        return wanted

    def count(num_stages: int) -> int:
        return planned(1, num_stages).num_partitions

    return Schedule("a function", plan_at, placement, partitions_per_stage=None, count=count)
