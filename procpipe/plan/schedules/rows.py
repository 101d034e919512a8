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

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Cycle,
    Plan,
    Task,
)


def makers(task: Task, num_partitions: int) -> tuple[Task, ...]:
    """List the tasks of neighbouring partitions that can make a task's input; a plan holds one."""
    kind, i, j = task
    if kind == FORWARD and j > 0:
        return (Task(FORWARD, i, j - 1),)
    if kind in (BACKWARD, INPUT_GRADIENT) and j < num_partitions - 1:
        return Task(BACKWARD, i, j + 1), Task(INPUT_GRADIENT, i, j + 1)
    return ()


def plan_of_rows(m: int, rows: Sequence[Sequence[Task]], placement: tuple[int, ...] = ()) -> Plan:
    """Make the plan in which each stage runs its row's tasks in order, as early as possible.

    Raises:
        ValueError: tasks are in another stage's row, or twice in one (lists all of them); or the
            stages would wait for each other forever (lists the task at which each stage waits).
    """
    placement = placement or tuple(range(len(rows)))
    if faults := list(_faults(rows, placement)):
        raise ValueError(f"these rows are no plan: {'; '.join(faults)}")
    p = len(placement)
    planned = {task for row in rows for task in row}
    needs = {task: planned.intersection(makers(task, p)) for task in planned}
    done: set[Task] = set()
    places = [0] * len(rows)
    cycles: list[Cycle] = []
    while len(done) < len(planned):
        cycle = tuple(
            row[place]
            for row, place in zip(rows, places, strict=True)
            if place < len(row) and needs[row[place]] <= done
        )
        if not cycle:
            waits = [
                f"stage {stage} waits at {row[place]}"
                for stage, (row, place) in enumerate(zip(rows, places, strict=True))
                if place < len(row)
            ]
            raise ValueError(f"these rows deadlock: {', '.join(waits)}")
        for task in cycle:
            places[placement[task.j]] += 1
        done.update(cycle)
        cycles.append(cycle)
    return Plan(m, len(rows), tuple(cycles), placement)


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


def _faults(rows: Sequence[Sequence[Task]], placement: Sequence[int]) -> Iterator[str]:
    stages = dict(enumerate(placement))
    for stage, row in enumerate(rows):
        for task, count in Counter(row).items():
            if stages.get(task.j) != stage:
                yield f"{task} is in the row of stage {stage}"
            if count > 1:
                yield f"{task} comes {count} times"
