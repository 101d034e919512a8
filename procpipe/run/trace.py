"""What a stage did and for how long: timed tasks of the last step, and sums over all steps.

Times are host times. On a GPU a task's host time is the time to launch it, so shares of busy time
say how the *host* was used there; on a CPU they say how the stage was used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from procpipe.plan.task import INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Task
from procpipe.timeline.idle import Split, split_table

#: What names a message: its kind, the partitions that it goes from and to, and the micro-batch.
Key = tuple[str, int, int, int]


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
        num_tasks: tasks by kind, "F", "R", "B", "I", "W".
        busy_s: seconds in tasks.
        waiting_s: seconds of waiting for messages.
        step_s: seconds in calls that ran a plan, from first to last task.
        sent_bytes: bytes of tensors sent, by kind of channel.
        num_messages: messages sent, by kind of channel.
        peak_held_bytes: most bytes of tensors held between tasks (see ``compute.stash``), since
            the last ``Stage.reset_peak_held_bytes``, if any; without what layers save for their
            backward, or put off to its second half.
        held_bytes: the same now; 0 between steps.
        split: how this stage spent the last step: busy, and idle because of the plan, of unequal
            stages and of communication. It takes the times of all stages, so it is that of the
            last ``stage.report()``, which every rank calls; None before.
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
    split: Split | None = None

    @property
    def bubble(self) -> float:
        """Share of the steps' time in which the stage ran no task, whatever the reason."""
        return 1.0 - self.busy_s / self.step_s if self.step_s else 0.0


class Trace:
    """Times the tasks of one stage.

    Attributes:
        records_messages: whether ``sent`` is to be told of every message.
    """

    records_messages = False

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tasks: Counter[str] = Counter()
        self.busy_ns = self.waiting_ns = self.step_ns = 0
        self.last_step_s = 0.0
        self._begun_ns = self._ended_ns = 0
        self._events: list[tuple[Task, int, int]] = []

    def on_layer(self, tell: Callable[[int], None]) -> Callable[[int], None]:
        """Return what is to be called with each layer that is entered, instead of ``tell``."""
        return tell

    def begin(self) -> None:
        """Start timing a step."""
        self._events = []
        self._begun_ns = time.perf_counter_ns()

    def start(self) -> int:
        """Note that a task starts; return what ``ran`` is to be told."""
        return time.perf_counter_ns()

    def ran(self, task: Task, start_ns: int) -> None:
        """Note that a task has just ended."""
        self._events.append((task, start_ns, time.perf_counter_ns()))

    def took(self, key: Key, tensors: Sequence[Tensor], start_ns: int) -> None:
        """Note that a message that was waited for has just been taken."""
        self.waiting_ns += time.perf_counter_ns() - start_ns

    def sent(self, key: Key, tensors: Sequence[Tensor], start_ns: int) -> None:
        """Note that a message has just been sent."""

    def end(self) -> None:
        """Add the step to the sums."""
        self.num_steps += 1
        self._ended_ns = time.perf_counter_ns()
        taken_ns = self._ended_ns - self._begun_ns
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

    def last_record(self) -> dict[str, Any]:
        """Return the last step as plain JSON, for ``merging.py``: nanoseconds of this clock."""
        begun_ns = self._begun_ns
        return {
            "step": self.num_steps - 1,
            "begin": begun_ns,
            "end": max(begun_ns, self._ended_ns),
            "tasks": [
                [*task, start - begun_ns, end - begun_ns] for task, start, end in self._events
            ],
        }


def table(stages: Sequence[StageStatistics]) -> str:
    """Lay out the statistics of all stages as a text table, one line a stage.

    Where it is known, a second table tells how each stage spent the last step.
    """
    in_two = (INPUT_GRADIENT, WEIGHT_GRADIENT)
    kinds = [k for k in KINDS if k not in in_two or any(k in s.num_tasks for s in stages)]
    header = (
        f"{'stage':>5} {'steps':>6} {' '.join(f'{kind:>7}' for kind in kinds)} {'busy s':>8} "
        f"{'waiting s':>10} {'idle':>7} {'sent MiB':>9} {'messages':>9} {'peak held MiB':>14}"
    )
    lines = [header, *(_line(s, kinds) for s in stages)]
    splits = [s.split for s in stages if s.split is not None]
    if splits:
        lines += ["", "the last step:", split_table(splits)]
    return "\n".join(lines)


def _line(s: StageStatistics, kinds: Sequence[str]) -> str:
    return (
        f"{s.stage:>5} {s.num_steps:>6} "
        f"{' '.join(f'{s.num_tasks.get(kind, 0):>7}' for kind in kinds)} {s.busy_s:>8.2f} "
        f"{s.waiting_s:>10.2f} {s.bubble:>7.1%} {sum(s.sent_bytes.values()) / 2**20:>9.2f} "
        f"{sum(s.num_messages.values()):>9} {s.peak_held_bytes / 2**20:>14.3f}"
    )
