"""The schedules a user can name, and what a schedule is: sizes in, plan out."""

from __future__ import annotations

from collections.abc import Callable, Collection

from procpipe.errors import PlanError
from procpipe.plan.gpipe import gpipe
from procpipe.plan.one_f_one_b import one_f_one_b
from procpipe.plan.task import Plan

__all__ = ["SCHEDULES", "Schedule", "schedule_of"]

#: The plan of a whole mini-batch, forward and backward, from the number of micro-batches, of
#: stages, and the micro-batches to recompute.
Schedule = Callable[[int, int, Collection[int]], Plan]

SCHEDULES: dict[str, Schedule] = {
    "gpipe": lambda m, n, recompute: gpipe(m, n, recompute=recompute),
    "1f1b": lambda m, n, recompute: one_f_one_b(m, n, recompute=recompute),
}


def schedule_of(schedule: str | Callable[[int, int], Plan]) -> Schedule:
    """Return the schedule that a user names or has written.

    Args:
        schedule: a name in ``SCHEDULES``; or a function of the number of micro-batches and of
            stages, whose plan says itself what is recomputed.

    Raises:
        ValueError: there is no schedule of that name.
        TypeError: neither a name nor a function.
    """
    if callable(schedule):
        return _written(schedule)
    if not isinstance(schedule, str):
        raise TypeError(f"schedule is {schedule!r}, but must be a str or a function (m, n) -> Plan")
    if schedule not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule is {schedule!r}, but must be one of {names}, or a function")
    return SCHEDULES[schedule]


def _written(function: Callable[[int, int], Plan]) -> Schedule:
    def schedule(m: int, n: int, recompute: Collection[int]) -> Plan:
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

    return schedule
