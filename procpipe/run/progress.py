"""Writes on the board of this process which step, task and layer is running, for others to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import chain

import torch

from procpipe.compute.partition import Partition
from procpipe.compute.wrappers import ranks_of_shards
from procpipe.job.board import Board
from procpipe.job.grid import Grid
from procpipe.notes import write_note
from procpipe.plan.task import INPUT_GRADIENT, Task
from procpipe.run.messages import Order
from procpipe.run.observer import Observer
from procpipe.run.trace import Trace

#: How often the memory in use on a GPU is read, which takes as long as a task takes the host.
_READ_DEVICE_EVERY_S = 0.5


class Progress(Observer):
    """Keeps a board up to date; ``trace`` comes before it among the observers.

    Notes once that compiled layers have a whole backward.
    """

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
        self._has_noted = False
        self._num_before: dict[int, int] = {}
        places: list[str] = []
        for j, partition in partitions.items():
            self._num_before[j] = len(places)
            places += partition.layers.places
        parameters = chain.from_iterable(part.parameters() for part in partitions.values())
        shards = ranks_of_shards(parameters)
        board.write_facts({"device": str(device), "layers": places, "shards": shards})

    def begin_step(self, order: Order) -> None:
        """Write the number of micro-batches."""
        self._board.page.num_micro_batches = len(order.sizes)

    def begin_task(self, task: Task) -> None:
        """Write which task runs; note if it cannot do what its kind says."""
        self._board.start_task(task.kind, task.i)
        is_split = task.kind == INPUT_GRADIENT
        if is_split and not self._has_noted and self._partitions[task.j].is_compiled:
            self._has_noted = True
            grid = Grid.of(self._board.read())
            write_note(
                f"procpipe: {grid.stage_name(grid.rank)} runs the whole backward of compiled "
                "layers in the first of its two tasks (I), as their weight gradients cannot be put "
                "off"
            )

    def end_task(self, task: Task) -> None:
        """Write that none does."""
        self._board.page.letter = 0

    def on_layer(self, j: int) -> Callable[[int], None]:
        """Write which layer runs, by its index among all of the stage; -1 stays -1."""
        num_before, board = self._num_before[j], self._board

        def enter(index: int) -> None:
            board.page.layer_index = index + num_before if index >= 0 else -1

        return enter

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
