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

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
)

#: The tasks that make something for the partition after theirs, 1, or for the one before it, -1.
_SIDES = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: -1}


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
    cycles: defaultdict[float, list[Task]] = defaultdict(list)
    for row, starts in zip(of_stages, starts_of_rows(of_stages), strict=True):
        for task, k in zip(row, starts, strict=True):
            cycles[k].append(task)
    return Plan(m, len(of_stages), [tuple(cycles[k]) for k in range(len(cycles))], placement)


def starts_of_rows(
    rows: Sequence[Sequence[Task]], length: Callable[[Task], float] = lambda task: 1
) -> list[list[float]]:
    """Return when the tasks of each row start: in order, each as early as possible.

    What a task uses of the neighbouring partition is made first, if any row makes it.

    Args:
        rows: the tasks of each stage, in order.
        length: how long a task takes; by default one clock cycle.

    Raises:
        ValueError: the rows would wait for each other forever.
    """
    # When what a task uses is made: by the side that it comes from, partition and micro-batch. At
    # infinity until known.
    made: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for kind, i, j in chain.from_iterable(rows):
        if side := _SIDES.get(kind, 0):
            made[side, j + side][i] = math.inf
    starts: list[list[float]] = [[] for _ in rows]
    queues = [deque(row) for row in rows]
    free = [0.0] * len(queues)
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, i, j = queue[0]
                side = _SIDES.get(kind, 0)
                start = max(free[stage], made[side, j].get(i, 0))
                if start == math.inf:
                    break
                starts[stage].append(start)
                free[stage] = made[side, j + side][i] = start + length(queue.popleft())
                goes_on = True
    if waits := [f"stage {k} waits at {queue[0]}" for k, queue in enumerate(queues) if queue]:
        raise ValueError(f"these rows deadlock, as they wait for each other: {', '.join(waits)}")
    return starts


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
