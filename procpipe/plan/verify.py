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

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

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
)

#: By kind and partition, the cycle of each micro-batch's task.
_Cycles = Mapping[tuple[str, int], Mapping[int, int]]


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
    cycles: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for k, cycle in enumerate(plan.cycles):
        for kind, i, j in cycle:
            cycles[kind, j].setdefault(i, k)
    if faults := [*_task_faults(plan, cycles), *_order_faults(routes, cycles)]:
        raise PlanError(faults)


# 1. Tasks -----------------------------------------------------------------------------------


def _task_faults(plan: Plan, cycles: _Cycles) -> Iterator[str]:
    m, p = plan.num_micro_batches, plan.num_partitions
    if sum(map(len, cycles.values())) < sum(map(len, plan.cycles)):
        for task, number in Counter(plan.tasks()).items():
            if number > 1:
                when = [
                    str(k) for k, cycle in enumerate(plan.cycles) for one in cycle if one == task
                ]
                yield f"{task} comes {number} times, in cycles {', '.join(when)}"
    for (kind, j), of_partition in cycles.items():
        is_real = kind in KINDS and 0 <= j < p
        for i in of_partition.keys() - range(m) if is_real else of_partition:
            yield (
                f"{Task(kind, i, j)} does not exist: there are {', '.join(KINDS)} of {m} "
                f"micro-batches in {p} partitions, each from 0"
            )
    stages = dict(enumerate(plan.placement))
    for k, cycle in enumerate(plan.cycles):
        for stage, number in Counter(stages.get(task.j, -1) for task in cycle).items():
            if number > 1 and stage >= 0:
                tasks = " and ".join(str(task) for task in cycle if stages.get(task.j) == stage)
                yield f"stage {stage} has {number} tasks in cycle {k}: {tasks}"
    kinds = {kind for kind, _ in cycles}
    if not kinds:
        yield "the plan has no tasks"
    for j in range(p):
        forward, whole, first, second = (cycles.get((kind, j), {}).keys() for kind in "FBIW")
        if FORWARD in kinds:
            for i in sorted({*range(m)} - forward):
                yield f"{Task(FORWARD, i, j)} is missing"
        if kinds - {FORWARD}:  # it has one backward, whole or split
            right = (whole - first - second) | ((first & second) - whole)
            for i in sorted({*range(m)} - right):
                b, *halves = (Task(kind, i, j) for kind in "BIW")
                there = [str(task) for task in (b, *halves) if i in cycles.get((task.kind, j), ())]
                yield (
                    f"the plan must have {b}, or {halves[0]} and {halves[1]}, but has "
                    f"{' and '.join(there) or 'none of them'}"
                )


# 2. Order -----------------------------------------------------------------------------------


#: What comes before a task in the same partition, if the plan has it.
_BEFORE: Mapping[str, Sequence[str]] = {
    RECOMPUTE: (FORWARD,),
    BACKWARD: (FORWARD, RECOMPUTE),
    INPUT_GRADIENT: (FORWARD, RECOMPUTE),
    WEIGHT_GRADIENT: (INPUT_GRADIENT,),
}


def _order_faults(routes: Routes, cycles: _Cycles) -> Iterator[str]:
    for (kind, j), of_partition in cycles.items():
        first = Task(kind, 0, j)  # tasks of other micro-batches need the same of theirs
        needs: list[tuple[Task, Transfer | None]] = []
        needs += [(first._replace(kind=before), None) for before in _BEFORE.get(kind, ())]
        needs += [(maker, sent) for sent in routes.used_by(first) for maker in sent.makers]
        for before, sent in needs:
            for i, made in cycles.get((before.kind, before.j), {}).items():
                if made >= of_partition.get(i, math.inf):
                    task, maker = first._replace(i=i), before._replace(i=i)
                    sent = sent and sent._replace(i=i)
                    what = f"'{sent}', which {maker} makes" if sent else f"{maker}, which is"
                    yield f"{task} in cycle {of_partition[i]} needs {what} in cycle {made}"
