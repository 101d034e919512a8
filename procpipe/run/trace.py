"""What a stage did and for how long: timed tasks of the last step, and sums over all steps.

Times are host times. On a GPU a task's host time is the time to launch it, so shares of busy time
say how the *host* was used there; on a CPU they say how the stage was used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from procpipe.plan.task import Task

__all__ = ["StageStatistics", "TimedTask", "Trace", "table"]


@dataclass(frozen=True)
class TimedTask:
    """One task of the last step; times in seconds since the step began on this stage."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageStatistics:
    """What one stage did since it was made.

    Attributes:
        stage: which stage; its rank is the same number.
        num_steps: calls that ran a plan.
        num_tasks: tasks by kind, "F", "B", "R".
        busy_s: seconds in tasks.
        waiting_s: seconds of waiting for messages.
        step_s: seconds in calls that ran a plan, from first to last task.
        sent_bytes: bytes of tensors sent, by kind of channel.
        num_messages: messages sent, by kind of channel.
        peak_held_bytes: most bytes of tensors held between tasks (see ``compute.stash``).
        held_bytes: the same now; 0 between steps.
    """

    stage: int
    num_steps: int
    num_tasks: dict[str, int]
    busy_s: float
    waiting_s: float
    step_s: float
    sent_bytes: dict[str, int]
    num_messages: dict[str, int]
    peak_held_bytes: int
    held_bytes: int

    @property
    def bubble(self) -> float:
        """Share of the steps' time in which the stage ran no task."""
        return 1.0 - self.busy_s / self.step_s if self.step_s else 0.0


class Trace:
    """Times the tasks of one stage."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tasks: Counter[str] = Counter()
        self.busy_ns = self.waiting_ns = self.step_ns = 0
        self.last_step_s = 0.0
        self._begun_ns = 0
        self._events: list[tuple[Task, int, int]] = []

    def begin(self) -> None:
        """Start timing a step."""
        self._events = []
        self._begun_ns = time.perf_counter_ns()

    def ran(self, task: Task, start_ns: int) -> None:
        """Note that a task has just ended."""
        self._events.append((task, start_ns, time.perf_counter_ns()))

    def end(self) -> None:
        """Add the step to the sums."""
        self.num_steps += 1
        taken_ns = time.perf_counter_ns() - self._begun_ns
        self.step_ns += taken_ns
        self.last_step_s = taken_ns / 1e9
        for task, start_ns, end_ns in self._events:
            self.num_tasks[task.kind] += 1
            self.busy_ns += end_ns - start_ns

    def last_step(self) -> list[TimedTask]:
        """Return the tasks of the last step in the order they ran."""
        return [
            TimedTask(task, (start - self._begun_ns) / 1e9, (end - self._begun_ns) / 1e9)
            for task, start, end in self._events
        ]


def table(stages: Iterable[StageStatistics]) -> str:
    """Lay out the statistics of all stages as a text table, one line a stage."""
    header = (
        f"{'stage':>5} {'steps':>6} {'F':>7} {'R':>7} {'B':>7} {'busy s':>8} {'waiting s':>10} "
        f"{'bubble':>7} {'sent MiB':>9} {'messages':>9} {'peak held MiB':>14}"
    )
    return "\n".join([header, *(_line(s) for s in stages)])


def _line(s: StageStatistics) -> str:
    return (
        f"{s.stage:>5} {s.num_steps:>6} {s.num_tasks.get('F', 0):>7} "
        f"{s.num_tasks.get('R', 0):>7} {s.num_tasks.get('B', 0):>7} {s.busy_s:>8.2f} "
        f"{s.waiting_s:>10.2f} {s.bubble:>7.1%} {sum(s.sent_bytes.values()) / 2**20:>9.2f} "
        f"{sum(s.num_messages.values()):>9} {s.peak_held_bytes / 2**20:>14.3f}"
    )
