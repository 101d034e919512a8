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

from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Plan, Task


def fused(plan: Plan) -> Plan:
    """Fuse I and W of a plan of ``plan_of_rows`` into B wherever no other task starts later."""
    cycles = {task: k for k, cycle in enumerate(plan.cycles) for task in cycle}
    rows: list[list[Task]] = [[] for _ in range(plan.num_stages)]
    for stage, row in enumerate(rows):
        for task in plan.tasks_of(stage):
            kind, i, j = task
            is_pair = kind == WEIGHT_GRADIENT and row[-1] == (INPUT_GRADIENT, i, j)
            if is_pair and (j == 0 or cycles[task] < cycles[Task(INPUT_GRADIENT, i, j - 1)]):
                row[-1] = Task(BACKWARD, i, j)
            else:
                row.append(task)
    return plan_of_rows(plan.num_micro_batches, rows, plan.placement)
