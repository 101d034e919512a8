"""The named schedules: each makes a placement, and a plan for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from procpipe.errors import BalanceError, PlanError
from procpipe.plan.placement import folded, looped
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.plan.schedules.interleaved import interleaved
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.zero_bubble import fused, zb_h1, zb_v
from procpipe.plan.task import FORWARD, Plan


@dataclass(frozen=True)
class Schedule:
    """A way to run mini-batches of any number of micro-batches on any number of stages."""

    name: str  # its name for users
    #: Plans a whole mini-batch: ``m``, ``n``, partitions a stage, micro-batches to recompute.
    make: Callable[[int, int, int, Collection[int]], Plan]
    #: Returns the stage of each partition, from the numbers of partitions and of stages; of another
    #: number of partitions if it does not support that one.
    placement: Callable[[int, int], tuple[int, ...]] = lambda p, n: looped(n, n)

    def count(self, num_stages: int) -> int:
        """Return the default number of partitions: two a stage, if it supports them."""
        return len(self.placement(2 * num_stages, num_stages))

    def place(self, num_partitions: int, num_stages: int) -> tuple[int, ...]:
        """Return the stage of each partition. One stage may always have the model as one.

        Raises:
            BalanceError: the schedule does not support this number of partitions.
        """
        if num_partitions == num_stages == 1:
            return (0,)
        placement = self.placement(num_partitions, num_stages)
        if len(placement) != num_partitions:
            raise BalanceError(
                f"the balance makes {num_partitions} partitions, but schedule={self.name!r} runs "
                f"{len(placement)} on {num_stages} stages: give another balance, or change the "
                "number of stages, which is that of processes divided by replicas"
            )
        return placement

    def plan(self, m: int, placement: tuple[int, ...], recompute: Collection[int]) -> Plan:
        """Plan a mini-batch of ``m`` micro-batches on a placement that ``place`` has returned."""
        n = max(placement) + 1
        return self.make(m, n, len(placement) // n, recompute)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", lambda m, n, v, again: gpipe(m, n, recompute=again)),
        Schedule("1f1b", lambda m, n, v, again: one_f_one_b(m, n, recompute=again)),
        Schedule(
            "interleaved",
            lambda m, n, v, again: interleaved(m, n, v, recompute=again),
            lambda p, n: looped(max(1, p // n) * n, n),
        ),
        Schedule("zb-h1", lambda m, n, v, again: fused(zb_h1(m, n, recompute=again))),
        Schedule(
            "zb-v",  # as "zb-h1" where one stage has the model as one partition
            lambda m, n, v, again: fused((zb_v if v == 2 else zb_h1)(m, n, recompute=again)),
            lambda p, n: folded(2 * n, n),
        ),
    )
}


def _of_function(function: Callable[[int, int], Plan]) -> Schedule:
    """Return the schedule of a user's function; its plan of one micro-batch places the layers."""

    def make(m: int, n: int, v: int, recompute: Collection[int]) -> Plan:
        plan = _checked(function, m, n)
        is_whole = n == v == 1 < plan.num_partitions
        return one_f_one_b(m, 1, recompute=recompute) if is_whole else plan

    return Schedule("a function", make, lambda p, n: _checked(function, 1, n).placement)


def _checked(function: Callable[[int, int], Plan], m: int, n: int) -> Plan:
    """Return a user's plan if it is of the step that it was asked for; ``verify`` does the rest."""
    plan = function(m, n)
    if not isinstance(plan, Plan):
        raise TypeError(
            f"schedule({m}, {n}) returned {plan!r}, but must return a procpipe.plan.task.Plan"
        )
    faults = []
    if (plan.num_micro_batches, plan.num_stages) != (m, n):
        faults.append(f"of {plan.num_micro_batches} micro-batches and {plan.num_stages} stages")
    faults += [] if FORWARD in plan.kinds else ["without forward tasks"]
    faults += [] if plan.has_backward else ["without backward tasks"]
    if faults:
        raise PlanError([f"schedule({m}, {n}) returned a plan {fault}" for fault in faults])
    return plan


def schedule_of(schedule: str | Callable[[int, int], Plan]) -> Schedule:
    """Return the schedule of a name or of a user's function; ``ValueError`` if it is neither."""
    if callable(schedule):
        return _of_function(schedule)
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule is {schedule!r}, but must be one of {', '.join(map(repr, SCHEDULES))}, or a "
            "function (m, n) -> Plan"
        )
    return SCHEDULES[schedule]
