"""Fuses I and W into B where splitting gains nothing.

Split backward has a cost: two tasks instead of one, and tensors that are kept between them. It
gains time only if another stage needs the gradient before ``W`` has ended. Where ``W`` follows
right after its ``I``, and the user of the gradient starts no sooner than ``W`` ends, one ``B``
delays no task:

    stage 0   ······[I0][W0]            stage 0   ······[I0][W0]
    stage 1   [I0][W0]                  stage 1   [──B0──]          and likewise B0 on stage 0

Every task is taken to last one clock cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Plan, Task


def fused(plan: Plan) -> Plan:
    """Fuse I and W of a plan of ``plan_of_rows`` into B wherever no other task starts later."""
    cycles = {task: k for k, cycle in enumerate(plan.cycles) for task in cycle}
    rows = [list(_joined(plan.tasks_of(stage), cycles)) for stage in range(plan.num_stages)]
    return plan_of_rows(plan.num_micro_batches, rows, plan.placement)


def _joined(row: Sequence[Task], cycles: Mapping[Task, int]) -> Iterator[Task]:
    follows = dict(pairwise(row))
    joined: set[Task] = set()
    for task in row:
        kind, i, j = task
        second = Task(WEIGHT_GRADIENT, i, j)
        is_pair = kind == INPUT_GRADIENT and follows.get(task) == second
        if is_pair and (j == 0 or cycles[second] < cycles[Task(INPUT_GRADIENT, i, j - 1)]):
            joined.add(second)
            yield Task(BACKWARD, i, j)
        elif task not in joined:
            yield task
