"""The plan with the least memory: one micro-batch runs after another."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.rows import makers
from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
)


def one_at_a_time(
    m: int, routes: Routes, *, recompute: Collection[int] = (), in_two: bool = False
) -> Plan:
    """Plan a mini-batch whose micro-batches run one after another, which holds the least memory.

    (With split backward, a plan that waits for a message elsewhere may hold a little less.) The
    arguments are those of ``list_schedule`` and ``ListRule``.
    """
    partitions = range(len(routes.placement))
    backward = (INPUT_GRADIENT, WEIGHT_GRADIENT) if in_two else (BACKWARD,)
    order = []
    for i in range(m):
        kinds = (RECOMPUTE, *backward) if i in recompute else backward
        order += [Task(FORWARD, i, j) for j in partitions]
        order += [Task(kind, i, j) for j in reversed(partitions) for kind in kinds]
    return in_cycles(m, order, routes)


def in_cycles(m: int, order: Sequence[Task], routes: Routes) -> Plan:
    """Put tasks, in the order of their starts, into as few clock cycles as possible."""
    placement = routes.placement
    cycles: list[list[Task]] = []
    busy: set[int] = set()
    made: set[Task] = set()
    for task in order:
        stage = placement[task.j]
        if not cycles or stage in busy or not made.isdisjoint(makers(task, len(placement))):
            cycles.append([])
            busy.clear()
            made.clear()
        cycles[-1].append(task)
        busy.add(stage)
        made.add(task)
    return Plan(m, routes.num_stages, tuple(map(tuple, cycles)), placement)
