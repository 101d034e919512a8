"""From what each stage does, in order, to clock cycles.

Many schedules are easier to say stage by stage than cycle by cycle. The cycles follow: in each, a
stage runs its next task if what the task uses was made in an earlier cycle, and rests if not.

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
from collections.abc import Iterator, Sequence

from procpipe.plan.task import BACKWARD, FORWARD, INPUT_GRADIENT, Cycle, Plan, Task


def makers(task: Task, num_partitions: int) -> tuple[Task, ...]:
    """List the tasks of neighbouring partitions that may make what a task uses; one does."""
    kind, i, j = task
    if kind == FORWARD and j > 0:
        return (Task(FORWARD, i, j - 1),)
    if kind in (BACKWARD, INPUT_GRADIENT) and j < num_partitions - 1:
        return Task(BACKWARD, i, j + 1), Task(INPUT_GRADIENT, i, j + 1)
    return ()


def plan_of_rows(m: int, rows: Sequence[Sequence[Task]], placement: tuple[int, ...] = ()) -> Plan:
    """Make the plan in which each stage does its row's tasks in order, as early as it can.

    Args:
        m: the number of micro-batches.
        rows: the tasks of each stage.
        placement: the stage of each partition; one partition a stage if left out.

    Raises:
        ValueError: a task is in another stage's row, or twice in one; or the stages would wait for
            each other for ever. Lists all such tasks, or says where each stage stands.
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
                f"stage {stage} stands at {row[place]}"
                for stage, (row, place) in enumerate(zip(rows, places, strict=True))
                if place < len(row)
            ]
            raise ValueError(f"these rows come to no end: {', '.join(waits)}")
        for task in cycle:
            places[placement[task.j]] += 1
        done.update(cycle)
        cycles.append(cycle)
    return Plan(m, len(rows), tuple(cycles), placement)


def _faults(rows: Sequence[Sequence[Task]], placement: Sequence[int]) -> Iterator[str]:
    stages = dict(enumerate(placement))
    for stage, row in enumerate(rows):
        for task, count in Counter(row).items():
            if stages.get(task.j) != stage:
                yield f"{task} is in the row of stage {stage}"
            if count > 1:
                yield f"{task} comes {count} times"
