"""The schedules a user can name, and what a schedule is: a placement, and from sizes a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from procpipe.errors import BalanceError, PlanError
from procpipe.plan.costs import Costs
from procpipe.plan.placement import folded, looped
from procpipe.plan.schedules.fuse import fused
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.plan.schedules.interleaved import interleaved
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.zero_bubble import zb_h1, zb_v
from procpipe.plan.task import Plan


@dataclass(frozen=True)
class Schedule:
    """A way to run mini-batches of any number of micro-batches on any number of stages.

    Attributes:
        name: what the user calls it.
        plan: makes the plan of a whole mini-batch, forward and backward, from the number of
            micro-batches, the placement and the micro-batches to recompute.
        placement: makes the stage of each partition from the numbers of partitions and of stages.
        partitions_per_stage: how many partitions a stage it is for; None for any number.
        count: makes the number of partitions from that of stages, where the user does not say.
        is_measured: whether plans are chosen by measurements instead, by ``tuning.auto``.
    """

    name: str
    plan: Callable[[int, tuple[int, ...], Collection[int]], Plan]
    placement: Callable[[int, int], tuple[int, ...]] = looped
    partitions_per_stage: int | None = 1
    count: Callable[[int], int] = lambda num_stages: num_stages
    is_measured: bool = False

    def place(self, num_partitions: int, num_stages: int) -> tuple[int, ...]:
        """Return the stage of each partition.

        Raises:
            BalanceError: the schedule is not for so many partitions a stage.
        """
        if num_partitions == 1:
            return (0,)
        v, rest = divmod(num_partitions, num_stages)
        if rest or v < 1 or self.partitions_per_stage not in (None, v):
            wanted = {1: "one partition", 2: "two partitions"}.get(
                self.partitions_per_stage or 0, "the same number of partitions, one or more,"
            )
            raise BalanceError(
                f"the balance makes {num_partitions} partitions for {num_stages} processes, but "
                f"schedule={self.name!r} needs {wanted} for each"
            )
        return self.placement(num_partitions, num_stages)


def _num_stages(placement: tuple[int, ...]) -> int:
    return max(placement) + 1


def _twice(num_stages: int) -> int:
    return 2 * num_stages


def _interleaved(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
    n = _num_stages(placement)
    return interleaved(m, n, len(placement) // n, recompute=recompute)


def _zb_h1(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
    return _in_two_where_it_helps(zb_h1(m, _num_stages(placement), recompute=recompute))


def _zb_v(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
    if len(placement) == 1:  # one stage with the whole model
        return _zb_h1(m, placement, recompute)
    return _in_two_where_it_helps(zb_v(m, _num_stages(placement), recompute=recompute))


def _in_two_where_it_helps(plan: Plan) -> Plan:
    """Join the halves that would be needed apart by nobody if all tasks took equally long."""
    return fused(plan, Costs.uniform(plan.num_partitions, forward_s=1.0, backward_s=2.0))


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", lambda m, at, recompute: gpipe(m, _num_stages(at), recompute=recompute)),
        Schedule(
            "1f1b", lambda m, at, recompute: one_f_one_b(m, _num_stages(at), recompute=recompute)
        ),
        Schedule("interleaved", _interleaved, partitions_per_stage=None, count=_twice),
        Schedule("zb-h1", _zb_h1),
        Schedule("zb-v", _zb_v, placement=folded, partitions_per_stage=2, count=_twice),
    )
}


def _auto_placement(num_partitions: int, num_stages: int) -> tuple[int, ...]:
    place = folded if num_partitions == 2 * num_stages else looped
    return place(num_partitions, num_stages)


def _no_plan(m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
    raise AssertionError("the plans of 'auto' come from tuning/auto.py")


#: What a user asks for by ``schedule="auto"``: a placement, for which plans are searched.
AUTO = Schedule(
    "auto", _no_plan, placement=_auto_placement, partitions_per_stage=None, is_measured=True
)


def schedule_of(schedule: str | Callable[[int, int], Plan]) -> Schedule:
    """Return the schedule that a user names or has written.

    Args:
        schedule: a name in ``SCHEDULES``, or ``"auto"``; or a function of the number of
            micro-batches and of stages, whose plan says itself what is recomputed and where its
            partitions are.

    Raises:
        ValueError: there is no schedule of that name.
        TypeError: neither a name nor a function.
    """
    if callable(schedule):
        return _written(schedule)
    if not isinstance(schedule, str):
        raise TypeError(f"schedule is {schedule!r}, but must be a str or a function (m, n) -> Plan")
    if schedule == AUTO.name:
        return AUTO
    if schedule not in SCHEDULES:
        names = ", ".join(map(repr, (*SCHEDULES, AUTO.name)))
        raise ValueError(f"schedule is {schedule!r}, but must be one of {names}, or a function")
    return SCHEDULES[schedule]


def _written(function: Callable[[int, int], Plan]) -> Schedule:
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
        n = _num_stages(placement)
        plan = planned(m, n)
        if n == 1 and len(placement) < plan.num_partitions:  # one stage with the whole model
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
