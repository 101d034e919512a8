"""A log that also keeps each wait and each message.

Used instead of the plain ``Log`` by ``Stage(trace=…)``. Each rank writes what it has recorded of a
step to a file of its own (``chrome.py``), so a recording needs no other rank. While torch's
profiler is on, its profile has the names of tasks.

On a GPU the host's times say when a task was launched. There a CUDA event is recorded at either end
of a task and of a sum over replicas, and the host waits for the last one when the step is over: so
tracing keeps the host from running ahead into the next step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.log import Log, Send, Take, Work
from procpipe.run.order import Order
from procpipe.timeline.chrome import TraceFile
from procpipe.torch_internals import is_profiler_on
from procpipe.tree import Flat


class Recorder(Log):
    """Records all that happens on one stage, one step at a time."""

    def __init__(self, path: Path, rank: int, facts: Mapping[str, Any], *of_log: Any) -> None:
        super().__init__(*of_log)
        self._place = path, rank, facts
        self._file: TraceFile | None = None
        self._takes: list[list[Any]] = []
        self._sends: list[list[Any]] = []
        self._is_cuda = self._device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._begun_sums: dict[str, list[torch.cuda.Event]] = {}  # began, asked for
        self._marks_of_sums: list[list[torch.cuda.Event]] = []

    def connected(self, run: int) -> None:
        """Begin this rank's file."""
        path, rank, facts = self._place
        self._file = TraceFile(path, rank, run, facts)

    def finish(self) -> None:
        """Note in the file that the run has ended well."""
        if self._file is not None:
            self._file.close()

    def begin_step(self, order: Order) -> None:
        """Start timing a step; drop what a step that failed has left."""
        for recorded in (self._takes, self._sends, self._marks):
            recorded.clear()
        self._begun_sums.clear()
        self._marks_of_sums.clear()
        super().begin_step(order)

    def of_task(self, task: Task, work: Work) -> Work:
        """Mark both ends of a task on the device, too, and name it in torch's profile."""
        timed = super().of_task(task, work)

        def run(*args: Any) -> Any:
            if self._is_cuda:
                self._marks.append(_event())
            with record_function(str(task)) if is_profiler_on() else nullcontext():
                made = timed(*args)
            if self._is_cuda:
                self._marks.append(_event())
            return made

        return run

    def of_take(self, transfer: Transfer, take: Take) -> Take:
        """Keep each message that is taken, and the wait for it."""
        return self._keeping(self._takes, transfer, super().of_take(transfer, take))

    def of_send(self, transfer: Transfer, send: Send) -> Send:
        """Keep each message that is sent."""
        return self._keeping(self._sends, transfer, super().of_send(transfer, send))

    def _keeping(self, kept: list[list[Any]], transfer: Transfer, work: Work) -> Work:
        def run(*sent: Flat) -> Any:
            start_ns = time.perf_counter_ns()
            taken = work(*sent)
            (message,) = sent or (taken,)
            num_bytes = sum(tensor.nbytes for tensor in message.tensors)
            kept.append([*transfer, num_bytes, start_ns, time.perf_counter_ns()])
            return taken

        return run

    def begin_sum(self, what: str) -> None:
        """Mark where a sum begins."""
        if self._is_cuda:
            self._begun_sums[what] = [_event()]

    def ask_sum(self, what: str) -> None:
        """Mark where the device begins to wait for a sum."""
        if self._is_cuda:
            self._begun_sums[what].append(_event())

    def added_up(self, what: str, num_bytes: int, begun_ns: int, asked_ns: int) -> None:
        """Keep a sum over replicas, and the wait for it."""
        super().added_up(what, num_bytes, begun_ns, asked_ns)
        if self._is_cuda:
            marks = self._begun_sums.pop(what)
            self._marks_of_sums.append([marks[0], marks[-1], _event()])

    def end_step(self, order: Order) -> None:
        """Add the step to the sums, and what was recorded of it to the file."""
        if self._marks or self._marks_of_sums:
            self._use_device_times()
        super().end_step(order)
        if self._file is not None:
            work = {"call": order.call, "sizes": order.sizes, "plan": order.plan}
            self._file.add(self.last_record() | work)

    def last_record(self) -> dict[str, Any]:
        """Return the last step as plain JSON, for ``steps.py``."""
        return super().last_record() | {"takes": self._takes, "sends": self._sends}

    def _use_device_times(self) -> None:
        """Put the device's times of tasks and sums in the place of the host's.

        The last event links both clocks: the device's times count back from it.
        """
        last = _event()
        last.synchronize()
        now_ns = time.perf_counter_ns()

        def at_ns(mark: torch.cuda.Event) -> int:
            return now_ns - round(float(mark.elapsed_time(last)) * 1e6)

        times_ns = list(map(at_ns, self._marks))
        self._tasks = [
            (task, start_ns, end_ns)
            for (task, _, _), start_ns, end_ns in zip(
                self._tasks, times_ns[::2], times_ns[1::2], strict=True
            )
        ]
        for k, (begun, asked, taken) in enumerate(self._marks_of_sums):
            self._sums[k] = *self._sums[k][:2], at_ns(begun), at_ns(asked), at_ns(taken)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
