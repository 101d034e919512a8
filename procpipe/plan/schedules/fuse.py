"""Fuses I and W into B where splitting gains nothing.

Split backward has a cost: two tasks instead of one, and tensors that are kept between them. It
gains time only if another stage needs the gradient before ``W`` has ended. Where ``W`` follows
right after its ``I``, and the user of the gradient starts no sooner than ``W`` ends, one ``B``
delays no task:

    stage 0   ······[I0][W0]            stage 0   ······[I0][W0]
    stage 1   [I0][W0]                  stage 1   [──B0──]          and likewise B0 on stage 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from procpipe.plan.costs import Costs
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.simulate import Timeline, simulate
from procpipe.plan.task import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Plan, Task, gradient_tasks


def fused(plan: Plan, costs: Costs) -> Plan:
    """Fuse I and W of a plan that verifies into B wherever no other task starts later."""
    timeline = simulate(plan, costs)
    hops_s = (0.0, *costs.hops_s(plan.placement))
    rows = [
        list(_joined(plan.tasks_of(stage), timeline, hops_s)) for stage in range(plan.num_stages)
    ]
    return plan_of_rows(plan.num_micro_batches, rows, plan.placement)


def _joined(row: Sequence[Task], timeline: Timeline, hops_s: Sequence[float]) -> Iterator[Task]:
    follows = dict(pairwise(row))
    joined: set[Task] = set()
    for task in row:
        kind, i, j = task
        second = Task(WEIGHT_GRADIENT, i, j)
        is_pair = kind == INPUT_GRADIENT and follows.get(task) == second
        if is_pair and timeline.end_s(second) + hops_s[j] <= _needed_s(i, j, timeline):
            joined.add(second)
            yield Task(BACKWARD, i, j)
        elif task not in joined:
            yield task


def _needed_s(i: int, j: int, timeline: Timeline) -> float:
    """Return when the previous partition starts to use the gradient of partition ``j``."""
    if j == 0:
        return math.inf
    for task in gradient_tasks(i, j - 1):
        try:
            return timeline.start_s(task)
        except KeyError:
            continue
    raise ValueError(f"micro-batch {i} has no backward in partition {j - 1}")
