"""Divides the time of a measured step, on each stage of each replica, into parts.

They add up to ``T``, the seconds of the step:

    busy             in tasks, as measured
    bubble           idle if all tasks of a kind took equally long and transfers no time: what the
                     plan costs, whatever the balance
    imbalance        idle in addition because tasks take different times, between stages or
                     micro-batches; transfers still take no time
    all-reduce       what sums over replicas make the step longer: waits for them on any stage,
                     after the last task of all. The same for all stages
    communication    the rest: ``T`` less the length of that step without transfers and sums.
                     Messages, and the host's work between tasks. The same for all stages

The two steps without transfers are replayed: each stage runs its tasks in the measured order, each
as soon as the stage is free and its inputs are made. With every task's own measured seconds a
replay is never longer than the measurement, so no part is negative. Of several replicas each is
replayed by itself; the longest replay counts for all.

    measured     stage 0  [F0][F1] ···· [─B1─] · [─B0─]        T
                 stage 1    · [F0] [F1][─B1─][─B0─] ·····
    replayed     stage 0  [F0][F1]···[─B1─][─B0─]              T less communication
                 stage 1  ···[F0][F1][─B1─][─B0─]····

``planner.simulate`` does the same for plans, with one number for each partition and kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import add
from statistics import fmean, median
from typing import TypeVar

from procpipe.plan.schedules.rows import starts_of_rows
from procpipe.plan.task import Task
from procpipe.run.statistics import Split
from procpipe.timeline.steps import Step, TimedTask

K = TypeVar("K")


def split(step: Step) -> list[Split]:
    """Divide a step's time on each stage."""
    means = seconds_by(lambda task: task.kind, [step], fmean)
    equal_s = free_s = 0.0
    for replica in range(step.num_replicas):
        timed = step.replica(replica)
        measured = {one.task: one.seconds for row in timed for one in row}
        rows = [[one.task for one in row] for row in timed]
        equal_s = max(equal_s, last_end_s(replay(rows, lambda task: means[task.kind])))
        free_s = max(free_s, last_end_s(replay(rows, measured.__getitem__)))
    free_s = min(free_s, step.seconds)  # clocks may be off
    sums_s = min(exposed_s(step), step.seconds - free_s)
    found = []
    for rank, row in enumerate(step.rows):
        replica, stage = divmod(rank, step.num_stages)
        busy_s = _added(one.seconds for one in row)
        idle_s = max(0.0, free_s - busy_s)
        bubble_s = min(idle_s, max(0.0, equal_s - _added(means[one.task.kind] for one in row)))
        rest_s = step.seconds - busy_s - idle_s - sums_s
        found.append(
            Split(stage, step.seconds, busy_s, bubble_s, idle_s - bubble_s, rest_s, sums_s, replica)
        )
    return found


def exposed_s(step: Step) -> float:
    """Return the seconds, after the last task of a step, in which a rank waited for a sum."""
    at_s = last_end_s(step.rows)
    total_s = 0.0
    for one in sorted(chain(*step.sums), key=lambda one: one.asked_s):
        total_s += max(0.0, one.taken_s - max(one.asked_s, at_s))
        at_s = max(at_s, one.taken_s)
    return total_s


def _added(seconds: Iterable[float]) -> float:
    """Add up in turn, as a replay does: ``sum`` rounds otherwise from Python 3.12 on."""
    return reduce(add, seconds, 0.0)


def seconds_by(
    key: Callable[[Task], K], steps: Iterable[Step], average: Callable[[list[float]], float]
) -> dict[K, float]:
    """Return the average seconds, over several steps, of the tasks with the same key."""
    groups: defaultdict[K, list[float]] = defaultdict(list)
    for step in steps:
        for one in chain(*step.rows):
            groups[key(one.task)].append(one.seconds)
    return {k: average(values) for k, values in groups.items()}


def usual_seconds(steps: Iterable[Step]) -> dict[tuple[str, int], float]:
    """Return the median seconds of tasks by kind and partition."""
    return seconds_by(lambda task: (task.kind, task.j), steps, median)


def replay(
    rows: Sequence[Sequence[Task]], seconds: Callable[[Task], float]
) -> list[list[TimedTask]]:
    """Return when tasks run without transfers, each as early as its stage's order allows.

    Raises:
        ValueError: the stages would wait for each other forever.
    """
    found = []
    for row, starts_s in zip(rows, starts_of_rows(rows, seconds), strict=True):
        timed = zip(row, starts_s, strict=True)
        found.append([TimedTask(task, start_s, start_s + seconds(task)) for task, start_s in timed])
    return found


def last_end_s(rows: Iterable[Sequence[TimedTask]]) -> float:
    """Return when the last task ends."""
    return max((one.end_s for row in rows for one in row), default=0.0)
