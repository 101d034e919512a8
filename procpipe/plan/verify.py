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

from procpipe.errors import PlanError
from procpipe.plan.placement import placement_faults
from procpipe.plan.routes import Routes
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
    if routes.num_stages != plan.num_stages:
        counts = f"{plan.num_stages} stages and the routes {routes.num_stages}"
        raise PlanError([f"the plan has {counts}; both must be of the same model"])
    if routes.placement != plan.placement:
        places = f"{list(plan.placement)} and the routes of {list(routes.placement)}"
        raise PlanError([f"the plan has the placement {places}; both must be of the same model"])
    if misplaced := list(placement_faults(plan.placement, plan.num_stages)):
        raise PlanError(misplaced)
    cycles = _cycles_of(plan)
    if faults := [*_task_faults(plan, cycles), *_order_faults(routes, cycles)]:
        raise PlanError(faults)


def _cycles_of(plan: Plan) -> _Cycles:
    cycles: defaultdict[Task, list[int]] = defaultdict(list)
    for k, cycle in enumerate(plan.cycles):
        for task in cycle:
            cycles[task].append(k)
    return dict(cycles)


# 1. Tasks -----------------------------------------------------------------------------------


def _task_faults(plan: Plan, cycles: _Cycles) -> Iterator[str]:
    for task, when in cycles.items():
        if task.kind not in KINDS:
            yield f"{task} is of the unknown kind {task.kind!r}; known: {', '.join(KINDS)}"
        if not 0 <= task.i < (m := plan.num_micro_batches):
            yield f"{task} is of a micro-batch that does not exist: there are {m}, from 0"
        if not 0 <= task.j < (p := plan.num_partitions):
            yield f"{task} is of a partition that does not exist: there are {p}, from 0"
        if len(when) > 1:
            yield f"{task} comes {len(when)} times, in cycles {', '.join(map(str, when))}"
    yield from _crowded(plan)
    yield from _missing(plan, cycles)


def _crowded(plan: Plan) -> Iterator[str]:
    stages = dict(enumerate(plan.placement))
    for k, cycle in enumerate(plan.cycles):
        busy = [stages.get(task.j) for task in cycle]
        if len(set(busy)) == len(cycle):
            continue
        for stage in sorted({stage for stage in busy if stage is not None}):
            if (count := busy.count(stage)) > 1:
                tasks = " and ".join(str(task) for task in cycle if stages.get(task.j) == stage)
                yield f"stage {stage} has {count} tasks in cycle {k}: {tasks}"


def _missing(plan: Plan, cycles: _Cycles) -> Iterator[str]:
    kinds = {task.kind for task in cycles}
    backward = kinds & {BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}
    if not backward and FORWARD not in kinds:
        yield "the plan has no forward and no backward tasks"
    for i in range(plan.num_micro_batches):
        for j in range(plan.num_partitions):
            if FORWARD in kinds and (FORWARD, i, j) not in cycles:
                yield f"{Task(FORWARD, i, j)} is missing"
            if backward:
                yield from _backward_faults(i, j, cycles)
    for task in cycles:
        if task.kind == RECOMPUTE and not cycles.keys() & {*gradient_tasks(task.i, task.j)}:
            yield f"{task} recomputes for {Task(BACKWARD, task.i, task.j)}, which is missing"


def _backward_faults(i: int, j: int, cycles: _Cycles) -> Iterator[str]:
    """Find a micro-batch whose backward is missing, incomplete or duplicated."""
    whole, first = gradient_tasks(i, j)
    second = Task(WEIGHT_GRADIENT, i, j)
    if whole in cycles:
        if halves := [task for task in (first, second) if task in cycles]:
            yield f"{whole} and {' and '.join(map(str, halves))} are both there"
    elif first not in cycles and second not in cycles:
        yield f"{whole} is missing"
    else:
        for half, other in ((first, second), (second, first)):
            if half not in cycles:
                yield f"{half} is missing, but {other} is there"


# 2. Order -----------------------------------------------------------------------------------


def _order_faults(routes: Routes, cycles: _Cycles) -> Iterator[str]:
    for task, (when, *_) in cycles.items():
        for before in _local_needs(task):
            if before in cycles and cycles[before][0] >= when:
                yield f"{task} in cycle {when} needs {before}, in cycle {cycles[before][0]}"
        for transfer in routes.used_by(task):
            for maker in transfer.makers:
                if maker in cycles and cycles[maker][0] >= when:
                    yield (
                        f"{task} in cycle {when} needs '{transfer}',"
                        f" which {maker} makes in cycle {cycles[maker][0]}"
                    )


def _local_needs(task: Task) -> Sequence[Task]:
    """List the tasks that must come before on the same stage, if the plan has them."""
    _, i, j = task
    if task.makes_gradient:
        return Task(FORWARD, i, j), Task(RECOMPUTE, i, j)
    if task.kind == RECOMPUTE:
        return (Task(FORWARD, i, j),)
    if task.kind == WEIGHT_GRADIENT:
        return (Task(INPUT_GRADIENT, i, j),)
    return ()
