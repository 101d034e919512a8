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

from procpipe.plan.task import BACKWARD, FORWARD, Cycle, Plan, Task

__all__ = ["plan_of_rows"]


def plan_of_rows(m: int, rows: Sequence[Sequence[Task]]) -> Plan:
    """Make the plan in which each stage does its row's tasks in order, as early as it can.

    Args:
        m: the number of micro-batches.
        rows: the tasks of each stage.

    Raises:
        ValueError: a task is in another stage's row, or twice in one; or the stages would wait for
            each other for ever. Lists all such tasks, or says where each stage stands.
    """
    if faults := list(_faults(rows)):
        raise ValueError(f"these rows are no plan: {'; '.join(faults)}")
    done: set[Task] = set()
    planned = {task for row in rows for task in row}
    places = [0] * len(rows)
    cycles: list[Cycle] = []
    while len(done) < len(planned):
        cycle = tuple(
            row[place]
            for row, place in zip(rows, places, strict=True)
            if place < len(row) and _makers(row[place], len(rows)) & planned <= done
        )
        if not cycle:
            waits = [
                f"stage {stage} stands at {row[place]}"
                for stage, (row, place) in enumerate(zip(rows, places, strict=True))
                if place < len(row)
            ]
            raise ValueError(f"these rows come to no end: {', '.join(waits)}")
        for task in cycle:
            places[task.j] += 1
        done.update(cycle)
        cycles.append(cycle)
    return Plan(m, len(rows), tuple(cycles))


def _faults(rows: Sequence[Sequence[Task]]) -> Iterator[str]:
    for stage, row in enumerate(rows):
        for task, count in Counter(row).items():
            if task.j != stage:
                yield f"{task} is in the row of stage {stage}"
            if count > 1:
                yield f"{task} comes {count} times"


def _makers(task: Task, n: int) -> set[Task]:
    """Return the tasks of neighbouring stages that make what a task uses."""
    kind, i, j = task
    if kind == FORWARD and j > 0:
        return {Task(FORWARD, i, j - 1)}
    if kind == BACKWARD and j < n - 1:
        return {Task(BACKWARD, i, j + 1)}
    return set()
