"""What a stage does, noted as it does it.

    begin_step(order)
        what of_task returns     for each task: runs its layers, and notes when
        what of_take returns     for each message that is taken: waits for it
        what of_send returns     for each that is sent
    begin_sum(what, …)           for each sum over replicas (an all-reduce)
    ask_sum(what)                the stage begins to wait for it
    added_up(what, …)            and has it
    end_step(order)              not if it failed, and then nothing of it counts

Times are kept of the newest step, and added up over all: ``statistics()`` and ``report()`` read
them afterwards. A recorder (procpipe/timeline) keeps more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from procpipe.job.board import Board
from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.order import Order
from procpipe.tree import Flat

#: Functions of a program: run the layers of a task, take a message, send one.
Work = Callable[..., Any]
Take = Callable[[], Flat]
Send = Callable[[Flat], None]

#: How often the memory in use on a GPU is read, which takes as long as a task takes the host.
_READ_DEVICE_EVERY_S = 0.5


class Log:
    """The times of tasks, waits and sums over replicas, in nanoseconds."""

    def __init__(self, board: Board, device: torch.device) -> None:
        self.num_steps = 0
        self.num_tasks: Counter[str] = Counter()
        self.busy_ns = self.waiting_ns = self.step_ns = 0
        self.all_reduce_bytes = self.exposed_ns = 0
        self._tasks: list[tuple[Task, int, int]] = []
        self._board = board
        self._device = device
        self._device_read_s = 0.0
        self._begun_ns = self._ended_ns = 0
        self._sums: list[tuple[str, int, int, int, int]] = []
        board.page.device = str(device)

    # -- of the pipeline ------------------------------------------------------------------------

    def connected(self, run: int) -> None:
        """All ranks are connected, and have agreed on a number for this run."""

    def finish(self) -> None:
        """The pipeline closes after a good end: all was sent."""

    # -- of a step ------------------------------------------------------------------------------

    def begin_step(self, order: Order) -> None:
        """Start timing a step."""
        self._tasks, self._sums = [], []
        self._board.page.num_micro_batches = len(order.sizes)
        self._begun_ns = time.perf_counter_ns()

    def end_step(self, order: Order) -> None:
        """Add the step to the sums, and write them on the board."""
        self.num_steps += 1
        self._ended_ns = time.perf_counter_ns()
        self.step_ns += self._ended_ns - self._begun_ns
        for task, start_ns, end_ns in self._tasks:
            self.num_tasks[task.kind] += 1
            self.busy_ns += end_ns - start_ns
        for _, num_bytes, _, asked_ns, taken_ns in self._sums:
            self.all_reduce_bytes += num_bytes
            self.exposed_ns += taken_ns - asked_ns
        page = self._board.page
        if order.call != "forward" or not order.is_grad_enabled:  # else backward follows
            page.num_steps += 1
            page.num_samples += sum(order.sizes)
        page.busy_s, page.step_s = self.busy_ns / 1e9, self.step_ns / 1e9
        now_s = time.monotonic()
        if self._device.type == "cuda" and now_s > self._device_read_s + _READ_DEVICE_EVERY_S:
            self._device_read_s = now_s
            page.device_bytes = torch.cuda.memory_allocated(self._device)

    # -- of the functions of a program, as it is bound ------------------------------------------

    def of_task(self, task: Task, work: Work) -> Work:
        """Return what runs a task's layers and notes when, given what runs them."""

        def run(*args: Any) -> Any:
            begun_ns = time.perf_counter_ns()
            made = work(*args)
            self._tasks.append((task, begun_ns, time.perf_counter_ns()))
            return made

        return run

    def of_take(self, transfer: Transfer, take: Take) -> Take:
        """Return what takes a message and notes the wait for it, given what takes it."""

        def run() -> Flat:
            start_ns = time.perf_counter_ns()
            message = take()
            self.waiting_ns += time.perf_counter_ns() - start_ns
            return message

        return run

    def of_send(self, transfer: Transfer, send: Send) -> Send:
        """Return what sends a message, given what does."""
        return send

    # -- of replicas ----------------------------------------------------------------------------

    def begin_sum(self, what: str) -> None:
        """A sum over replicas has begun, or begins next: "loss", "gradients 0" (a bucket), …."""

    def ask_sum(self, what: str) -> None:
        """The stage begins to wait for a sum; not called if it has waited from the beginning."""

    def added_up(self, what: str, num_bytes: int, begun_ns: int, asked_ns: int) -> None:
        """A sum was taken just now, by the host.

        Args:
            what: see ``begin_sum``.
            num_bytes: of its tensor.
            begun_ns: when this stage began it.
            asked_ns: since when the stage had waited for it.
        """
        self._sums.append((what, num_bytes, begun_ns, asked_ns, time.perf_counter_ns()))

    @contextmanager
    def awaited_sum(self, what: str, num_bytes: int) -> Iterator[None]:
        """Surround a sum that the stage waits for from its beginning."""
        begun_ns = time.perf_counter_ns()
        self.begin_sum(what)
        yield
        self.added_up(what, num_bytes, begun_ns, begun_ns)

    # -- afterwards -----------------------------------------------------------------------------

    def last_record(self) -> dict[str, Any]:
        """Return the last step as plain JSON, in nanoseconds of this process's clock."""
        return {
            "step": self.num_steps - 1,
            "begin": self._begun_ns,
            "end": max(self._begun_ns, self._ended_ns),
            "tasks": [[*task, *times_ns] for task, *times_ns in self._tasks],
            "sums": self._sums,
        }
