"""Where the time of a measured step went, stage by stage: one function for page and statistics.

Each stage's share of a step of ``T`` seconds is divided in four, which add up to ``T``:

    busy             in tasks, as measured
    bubble           idle in a step of equal stages whose transfers take no time: what the plan
                     costs, whatever the balance
    imbalance        idle beyond that because tasks take unequally long, from stage to stage or
                     from one micro-batch to the next; transfers still take no time
    communication    the rest, ``T`` less the length of that step without transfers: messages on
                     their way, and what the host does between tasks. The same for all stages

The two imagined steps come from a replay: each stage runs its tasks in the order in which it did
run them, each as soon as the stage is free and the tasks that feed it have ended. With every
task's own measured seconds this is never longer than what was measured, so nothing is negative.

    measured     stage 0  [F0][F1] ···· [─B1─] · [─B0─]        T
                 stage 1    · [F0] [F1][─B1─][─B0─] ·····
    replayed     stage 0  [F0][F1]···[─B1─][─B0─]              T less communication
                 stage 1  ···[F0][F1][─B1─][─B0─]····

``simulate.py`` does the same for plans that have not run, with one number a stage and kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from procpipe.plan.task import Task
from procpipe.run.statistics import Split
from procpipe.timeline.recording import Step

K = TypeVar("K")

#: The kinds that send a gradient to the partition before.
_SENDS_UP = ("B", "I")


@dataclass(frozen=True)
class Replay:
    """When each task starts and ends, and when the last one does."""

    spans_s: Mapping[Task, tuple[float, float]]
    total_s: float


def split(step: Step) -> list[Split]:
    """Divide a step's time on each stage."""
    rows = [[ran.task for ran in step.row(stage)] for stage in range(step.num_stages)]
    measured = {ran.task: ran.seconds for ran in step.tasks}
    means = mean_seconds(step, lambda task: task.kind)
    equal_s = replay(rows, lambda task: means[task.kind]).total_s
    free_s = min(replay(rows, measured.__getitem__).total_s, step.seconds)  # clocks may be off
    return [
        _split_stage(stage, row, step.seconds, free_s, equal_s, measured, means)
        for stage, row in enumerate(rows)
    ]


def _split_stage(
    stage: int,
    row: Sequence[Task],
    step_s: float,
    free_s: float,
    equal_s: float,
    measured: Mapping[Task, float],
    means: Mapping[str, float],
) -> Split:
    busy_s = sum(measured[task] for task in row)
    idle_s = max(0.0, free_s - busy_s)
    bubble_s = min(idle_s, max(0.0, equal_s - sum(means[task.kind] for task in row)))
    imbalance_s = idle_s - bubble_s
    return Split(stage, step_s, busy_s, bubble_s, imbalance_s, step_s - busy_s - idle_s)


def mean_seconds(step: Step, key: Callable[[Task], K]) -> dict[K, float]:
    """Return the mean seconds of the tasks that have a key in common."""
    return {k: fmean(values) for k, values in _grouped([step], key).items()}


def median_seconds(steps: Iterable[Step], key: Callable[[Task], K]) -> dict[K, float]:
    """Return the median seconds, over several steps, of the tasks that have a key in common."""
    return {k: median(values) for k, values in _grouped(steps, key).items()}


def _grouped(steps: Iterable[Step], key: Callable[[Task], K]) -> dict[K, list[float]]:
    groups: defaultdict[K, list[float]] = defaultdict(list)
    for step in steps:
        for ran in step.tasks:
            groups[key(ran.task)].append(ran.seconds)
    return groups


def replay(rows: Sequence[Sequence[Task]], seconds: Callable[[Task], float]) -> Replay:
    """Run tasks in their stages' order without transfers, each as early as it can.

    Args:
        rows: the tasks of each stage, in order.
        seconds: how long a task takes.

    Raises:
        ValueError: the stages would wait for each other for ever.
    """
    present = {task for row in rows for task in row}
    spans_s: dict[Task, tuple[float, float]] = {}
    free_s = [0.0] * len(rows)
    places = [0] * len(rows)
    while len(spans_s) < len(present):
        num_before = len(spans_s)
        for stage, row in enumerate(rows):
            for task in row[places[stage] :]:
                makers = [maker for maker in _makers(task) if maker in present]
                if any(maker not in spans_s for maker in makers):
                    break
                start_s = max([free_s[stage], *(spans_s[maker][1] for maker in makers)])
                free_s[stage] = start_s + seconds(task)
                spans_s[task] = start_s, free_s[stage]
                places[stage] += 1
        if len(spans_s) == num_before:
            raise ValueError("the stages' tasks wait for each other")
    return Replay(spans_s, max(free_s, default=0.0))


def _makers(task: Task) -> list[Task]:
    """List the tasks of other partitions that make what a task uses."""
    kind, i, j = task
    if kind == "F":
        return [Task("F", i, j - 1)]
    if kind in _SENDS_UP:
        return [Task(sender, i, j + 1) for sender in _SENDS_UP]
    return []
