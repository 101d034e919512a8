"""Checks that a plan can run, or lists every fault.

    1. tasks        each task once, for an existing partition and micro-batch, one a stage and
                    cycle; every forward has its backward, whole or split, so that no tensor is
                    held after the plan (unless the plan has no backward at all)
    2. order        the inputs of a task were made in an earlier cycle

A plan with only backward tasks follows one with only forward tasks, which count as done. The
programs of a plan without faults run to their end on any transport, as ``program.py`` argues;
``tests/plan/proof.py`` proves it of each plan in the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from operator import itemgetter

from procpipe.errors import PlanError
from procpipe.plan.routes import Routes, Transfer
from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
    gradient_tasks,
)

#: The cycles that contain a task, ascending; one in a correct plan.
_Cycles = Mapping[Task, Sequence[int]]


def verify(plan: Plan, routes: Routes) -> None:
    """Check that a plan can run.

    Args:
        plan: the plan.
        routes: where its tensors go.

    Raises:
        PlanError: the plan has faults; lists all of them.
    """
    if routes.placement != plan.placement:
        places = f"{list(plan.placement)}, and the model of {list(routes.placement)}"
        raise PlanError([f"the plan has its partitions on the stages {places}"])
    if plan.placement[0] != 0 or {*plan.placement} != {*range(plan.num_stages)}:
        stages = f"stage 0, which has the mini-batch, and name all {plan.num_stages} stages"
        raise PlanError([f"the placement {list(plan.placement)} must begin with {stages}"])
    cycles: defaultdict[Task, list[int]] = defaultdict(list)
    for k, cycle in enumerate(plan.cycles):
        for task in cycle:
            cycles[task].append(k)
    if faults := [*_task_faults(plan, cycles), *_order_faults(routes, cycles)]:
        raise PlanError(faults)


# 1. Tasks -----------------------------------------------------------------------------------


def _task_faults(plan: Plan, cycles: _Cycles) -> Iterator[str]:
    m, p = plan.num_micro_batches, plan.num_partitions
    for task, when in cycles.items():
        if task.kind not in KINDS or not 0 <= task.i < m or not 0 <= task.j < p:
            yield (
                f"{task} does not exist: there are {', '.join(KINDS)} of {m} micro-batches in {p} "
                "partitions, each from 0"
            )
        if len(when) > 1:
            yield f"{task} comes {len(when)} times, in cycles {', '.join(map(str, when))}"
    for stage in range(plan.num_stages):
        for k, row in groupby(plan.row(stage), key=itemgetter(0)):
            tasks = [str(task) for _, task in row]
            if len(tasks) > 1:
                yield f"stage {stage} has {len(tasks)} tasks in cycle {k}: {' and '.join(tasks)}"
    kinds = {task.kind for task in cycles}
    if not kinds:
        yield "the plan has no tasks"
    for i, j in product(range(m), range(p)):
        if FORWARD in kinds and (FORWARD, i, j) not in cycles:
            yield f"{Task(FORWARD, i, j)} is missing"
        if kinds - {FORWARD}:  # it has one backward, whole or split
            (whole, first), second = gradient_tasks(i, j), Task(WEIGHT_GRADIENT, i, j)
            there = [task for task in (whole, first, second) if task in cycles]
            if there not in ([whole], [first, second]):
                found = " and ".join(map(str, there)) or "none of them"
                yield f"the plan must have {whole}, or {first} and {second}, but has {found}"


# 2. Order -----------------------------------------------------------------------------------


#: What comes before a task in the same partition, if the plan has it.
_BEFORE: Mapping[str, Sequence[str]] = {
    RECOMPUTE: (FORWARD,),
    BACKWARD: (FORWARD, RECOMPUTE),
    INPUT_GRADIENT: (FORWARD, RECOMPUTE),
    WEIGHT_GRADIENT: (INPUT_GRADIENT,),
}


def _order_faults(routes: Routes, cycles: _Cycles) -> Iterator[str]:
    for task, (when, *_) in cycles.items():
        needs: list[tuple[Task, Transfer | None]] = [
            (Task(kind, task.i, task.j), None) for kind in _BEFORE.get(task.kind, ())
        ]
        needs += [(maker, sent) for sent in routes.used_by(task) for maker in sent.makers]
        for before, sent in needs:
            if before in cycles and cycles[before][0] >= when:
                what = f"'{sent}', which {before} makes" if sent else f"{before}, which is"
                yield f"{task} in cycle {when} needs {what} in cycle {cycles[before][0]}"
