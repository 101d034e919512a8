"""Times the tasks of one stage: those of the last step, and sums over all steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.messages import Order
from procpipe.run.observer import Observer
from procpipe.run.statistics import TimedTask


class Trace(Observer):
    """Times the tasks of one stage; a step that fails counts for nothing."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tasks: Counter[str] = Counter()
        self.busy_ns = self.waiting_ns = self.step_ns = 0
        self._begun_ns = self._ended_ns = self._task_begun_ns = 0
        self.all_reduce_bytes = self.all_reduce_ns = self.exposed_ns = 0
        self._events: list[tuple[Task, int, int]] = []
        self._sums: list[tuple[str, int, int, int, int, int]] = []

    def begin_step(self, order: Order) -> None:
        """Start timing a step."""
        self._events, self._sums = [], []
        self._begun_ns = time.perf_counter_ns()

    def begin_layers(self, task: Task) -> None:
        """Note when a task starts; waiting for what it takes does not count."""
        self._task_begun_ns = time.perf_counter_ns()

    def end_task(self, task: Task) -> None:
        """Note that a task has just ended."""
        self._events.append((task, self._task_begun_ns, time.perf_counter_ns()))

    def waited(self, transfer: Transfer, tensors: Sequence[Tensor], start_ns: int) -> None:
        """Add to the time of waiting."""
        self.waiting_ns += time.perf_counter_ns() - start_ns

    def added_up(
        self, what: str, num_bytes: int, begun_ns: int, ended_ns: int, asked_ns: int
    ) -> None:
        """Keep a sum over replicas, and the wait for it."""
        taken_ns = time.perf_counter_ns()
        self._sums.append((what, num_bytes, begun_ns, ended_ns, asked_ns, taken_ns))

    def end_step(self, order: Order) -> None:
        """Add the step to the sums."""
        self.num_steps += 1
        self._ended_ns = time.perf_counter_ns()
        self.step_ns += self._ended_ns - self._begun_ns
        for task, start_ns, end_ns in self._events:
            self.num_tasks[task.kind] += 1
            self.busy_ns += end_ns - start_ns
        last_ns = 0
        for _, num_bytes, begun_ns, ended_ns, asked_ns, taken_ns in sorted(
            self._sums, key=lambda one: one[2]
        ):
            self.all_reduce_bytes += num_bytes
            self.all_reduce_ns += max(0, ended_ns - max(begun_ns, last_ns))  # several at a time
            self.exposed_ns += taken_ns - asked_ns
            last_ns = max(last_ns, ended_ns)

    def totals(self) -> dict[str, Any]:
        """Return the sums over all steps, under their names in ``StageStatistics``."""
        return {
            "num_steps": self.num_steps,
            "num_tasks": dict(self.num_tasks),
            "busy_s": self.busy_ns / 1e9,
            "waiting_s": self.waiting_ns / 1e9,
            "step_s": self.step_ns / 1e9,
            "all_reduce_bytes": self.all_reduce_bytes,
            "all_reduce_s": self.all_reduce_ns / 1e9,
            "exposed_s": self.exposed_ns / 1e9,
        }

    def last_step(self) -> list[TimedTask]:
        """Return the tasks of the last step in the order they ran."""
        return [
            TimedTask(task, (start - self._begun_ns) / 1e9, (end - self._begun_ns) / 1e9)
            for task, start, end in self._events
        ]

    def last_record(self) -> dict[str, Any]:
        """Return the last step as plain JSON, in nanoseconds of this process's clock."""
        return {
            "step": self.num_steps - 1,
            "begin": self._begun_ns,
            "end": max(self._begun_ns, self._ended_ns),
            "tasks": [[*task, *times_ns] for task, *times_ns in self._events],
            "sums": self._sums,
        }
