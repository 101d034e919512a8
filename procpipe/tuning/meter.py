"""Every rank's part in ``schedule="auto"``: measures the steps that rank 0's orders name.

    order.detail   StepDetail(schedule, measure="bytes" | "seconds" | "whole" | "")
    the step       "bytes": with hooks that count what layers save; else only timed by the trace
    afterwards     the ranks' reports ── control.agree ──> AutoSchedule.add_reports on rank 0

The hooks make a step slower, so the seconds of such a step do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from procpipe.compute.partition import Partition
from procpipe.compute.saved import SavedTensors
from procpipe.errors import MemoryLimitError
from procpipe.plan.routes import Transfer
from procpipe.plan.task import FORWARD, INPUT_GRADIENT, RECOMPUTE, Task
from procpipe.run.control import Control
from procpipe.run.messages import Order, StepDetail
from procpipe.run.observer import Observer
from procpipe.run.trace import Trace
from procpipe.tuning.auto import BYTES, NOTHING, AutoSchedule
from procpipe.tuning.step_costs import PUT_OFF, SAVED, Report


class Meter(Observer):
    """Measures this stage's steps, and reports to rank 0.

    Args:
        control: the connection to the other ranks.
        auto: rank 0's takes the reports of all ranks.
        partitions: the local layers, by the indices of this stage's partitions.
        trace: times the tasks; comes before this one among the observers.
    """

    def __init__(
        self,
        control: Control,
        auto: AutoSchedule,
        partitions: Mapping[int, Partition],
        trace: Trace,
    ) -> None:
        self._control = control
        self._auto = auto
        self._partitions = partitions
        self._trace = trace
        self._measure = NOTHING
        self._hooks = ExitStack()
        self._tensors = SavedTensors()
        self._sizes: dict[Transfer, int] = {}

    def begin_step(self, order: Order) -> None:
        """Measure what the order says."""
        detail = order.detail
        self._measure = detail.measure if isinstance(detail, StepDetail) else NOTHING
        self._sizes = {}

    def begin_layers(self, task: Task) -> None:
        """Hook what the layers of a task save."""
        if self._measure == BYTES and task.kind in (FORWARD, RECOMPUTE):
            self._tensors = SavedTensors()
            self._hooks.enter_context(self._tensors.hooks())

    def end_task(self, task: Task) -> None:
        """Count what the layers have saved, or put off to W."""
        if self._measure != BYTES:
            return
        self._hooks.close()
        kind, i, j = task
        partition = self._partitions[j]
        if kind in (FORWARD, RECOMPUTE):
            # What a first forward saves is gone where there is a second; that one counts.
            num_bytes = self._tensors.num_bytes(partition.tensors_of(i))
            self._sizes[Transfer(SAVED, i, j, j)] = num_bytes
        elif kind == INPUT_GRADIENT:
            self._sizes[Transfer(PUT_OFF, i, j, j)] = partition.put_off_bytes(i)

    def abandon_step(self) -> None:
        """Remove the hooks of a task that failed."""
        self._hooks.close()

    def held(self, sizes: Mapping[Transfer, int]) -> None:
        """Keep the bytes of all messages."""
        if self._measure == BYTES:
            self._sizes |= sizes

    def end_step(self, order: Order) -> None:
        """Report to rank 0 if something was measured; then waits for all ranks.

        Raises:
            MemoryLimitError: no plan keeps the limits; raised on every rank.
        """
        if self._measure == NOTHING:
            return
        report = Report(self._trace.last_step_s)
        if self._measure == BYTES:
            report.sizes = [(*transfer.channel, size) for transfer, size in self._sizes.items()]
        else:
            tasks = self._trace.last_step()
            report.tasks = [(*timed.task, timed.start_s, timed.end_s) for timed in tasks]
        lacks = self._control.agree(asdict(report), self._add_reports)
        if lacks:
            raise MemoryLimitError(lacks)

    def _add_reports(self, reports: list[Any]) -> Sequence[Sequence[int]]:
        """Take the reports of all ranks, on rank 0; return which stages lack memory, if any do."""
        try:
            self._auto.add_reports([Report(**report) for report in reports])
        except MemoryLimitError as error:
            return error.lacks
        return ()
