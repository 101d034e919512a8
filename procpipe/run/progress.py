"""Writes on the board of this process which step, task and layer is running, for others to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import chain

import torch

from procpipe.compute.partition import Partition
from procpipe.job.board import Board
from procpipe.plan.task import Task
from procpipe.run.messages import Order
from procpipe.run.observer import Observer
from procpipe.run.trace import Trace

#: How often the memory in use on a GPU is read, which takes as long as a task takes the host.
_READ_DEVICE_EVERY_S = 0.5


class Progress(Observer):
    """Keeps a board up to date; ``trace`` comes before it among the observers."""

    def __init__(
        self,
        board: Board,
        device: torch.device,
        partitions: Mapping[int, Partition],
        trace: Trace,
    ) -> None:
        self._board = board
        self._partitions = partitions
        self._device = device
        self._trace = trace
        self._device_read_s = 0.0
        board.page.device = str(device)

    def begin_step(self, order: Order) -> None:
        """Write the number of micro-batches."""
        self._board.page.num_micro_batches = len(order.sizes)

    def begin_task(self, task: Task) -> None:
        """Write which task runs."""
        self._board.start_task(task.kind, task.i)

    def end_task(self, task: Task) -> None:
        """Write that none does."""
        self._board.page.task = ""

    def on_layer(self, j: int) -> Callable[[int], None]:
        """Write which layer runs; index -1 is none."""
        places = [*self._partitions[j].layers.places, ""]
        return lambda index: self._board.enter(places[index])

    def end_step(self, order: Order) -> None:
        """Write the sums up to now."""
        is_done = order.call != "forward" or not order.is_grad_enabled  # else backward follows
        sizes = chain(*(of_one for of_one, _ in order.shares)) if order.shares else order.sizes
        page = self._board.page
        if is_done:
            page.num_steps += 1
            page.num_samples += sum(sizes)
        page.busy_s, page.step_s = self._trace.busy_ns / 1e9, self._trace.step_ns / 1e9
        now_s = time.monotonic()
        if self._device.type == "cuda" and now_s > self._device_read_s + _READ_DEVICE_EVERY_S:
            self._device_read_s = now_s
            page.device_bytes = torch.cuda.memory_allocated(self._device)
