"""From the tasks of each stage, in order, to clock cycles.

Many schedules are easier to define stage by stage than cycle by cycle. In each cycle, a stage runs
its next task if the task's inputs were made in an earlier cycle, and idles otherwise.

    rows                              k   stage 0   stage 1
    stage 0   F0 F1 B0 B1             0   F0
    stage 1   F0 B0 F1 B1             1   F1        F0
                                      2             B0
                                      3   B0        F1
                                      4             B1
                                      5   B1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
    gradient_tasks,
)


def makers(task: Task) -> tuple[Task, ...]:
    """List the tasks of the neighbouring partition that can make a task's input.

    A plan has one of them, or none at an end of the model.
    """
    kind, i, j = task
    if kind == FORWARD:
        return (Task(FORWARD, i, j - 1),)
    return gradient_tasks(i, j + 1) if task.makes_gradient else ()


def plan_of_rows(m: int, rows: Iterable[Iterable[Task]], placement: tuple[int, ...] = ()) -> Plan:
    """Make the plan in which each stage runs its row's tasks in order, as early as possible.

    Raises:
        ValueError: tasks are in another stage's row (lists all of them); or the stages would wait
            for each other forever (lists the task at which each stage waits).
    """
    of_stages = [list(row) for row in rows]
    stages = dict(enumerate(placement or range(len(of_stages))))
    faults = [
        f"{task} is in the row of stage {stage}"
        for stage, row in enumerate(of_stages)
        for task in row
        if stages.get(task.j) != stage
    ]
    if faults:
        raise ValueError(f"these rows are not a plan: {'; '.join(faults)}")
    cycles = tuple(tuple(cycle.values()) for cycle in cycles_of_rows(of_stages))
    return Plan(m, len(of_stages), cycles, placement)


def cycles_of_rows(rows: Sequence[Sequence[Task]]) -> Iterator[Mapping[int, Task]]:
    """Yield what runs in each clock cycle: the task of each row that is not idle, by its index.

    Raises:
        ValueError: the rows would wait for each other forever.
    """
    planned = {task for row in rows for task in row}
    needs = {task: planned.intersection(makers(task)) for task in planned}
    done: set[Task] = set()
    queues = [deque(row) for row in rows]
    while next_ones := {k: queue[0] for k, queue in enumerate(queues) if queue}:
        cycle = {k: task for k, task in next_ones.items() if needs[task] <= done}
        if not cycle:
            waits = (f"stage {k} waits at {task}" for k, task in next_ones.items())
            raise ValueError(
                f"these rows deadlock, as they wait for each other: {', '.join(waits)}"
            )
        for k in cycle:
            queues[k].popleft()
        done.update(cycle.values())
        yield cycle


def one_forward_one_backward(
    forward: Sequence[tuple[int, int]],
    backward: Iterable[tuple[int, int]],
    num_warm_up: int,
    recompute: Collection[int],
    num_deferred: int | None = None,
) -> Iterator[Task]:
    """Yield a stage's tasks: some forward tasks, then one forward and one backward in turn.

    Args:
        forward: micro-batch and partition of each forward task, in order.
        backward: the same of each backward task.
        num_warm_up: how many forward tasks come before the first backward.
        recompute: the micro-batches to recompute right before their backward.
        num_deferred: by how many backward tasks each ``W`` comes after its ``I``, where backward
            is split; None where it is not.
    """
    deferred: list[Task] = []
    remaining = iter([Task(FORWARD, i, j) for i, j in forward])
    yield from islice(remaining, num_warm_up)
    for i, j in backward:
        yield from islice(remaining, 1)
        if i in recompute:
            yield Task(RECOMPUTE, i, j)
        if num_deferred is None:
            yield Task(BACKWARD, i, j)
            continue
        yield Task(INPUT_GRADIENT, i, j)
        deferred.append(Task(WEIGHT_GRADIENT, i, j))
        if len(deferred) > num_deferred:
            yield deferred.pop(0)
    yield from deferred
