"""A trace that also keeps each wait, each message and the seconds of each layer.

Used instead of the plain ``Trace`` by ``Stage(trace=…)``, and by ``schedule="auto"`` on a GPU.
``collect.py`` sends what it has recorded of a step to rank 0.

On a GPU the host's times say when a task was launched. There a CUDA event is recorded at either end
of a task, and the host waits for the last one when the step is over: so tracing keeps the host from
running ahead into the next step. (Written, but not run on a GPU yet.)
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from procpipe.compute.ledger import num_bytes
from procpipe.plan.routes import Transfer
from procpipe.plan.task import FORWARD, RECOMPUTE, Task
from procpipe.run.messages import Order
from procpipe.run.trace import Trace


class Recorder(Trace):
    """Records all that happens on one stage, one step at a time.

    Args:
        device: the stage's device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._takes: list[list[Any]] = []
        self._sends: list[list[Any]] = []
        self._is_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._layer, self._layer_begun_ns = -1, 0
        self._passed: list[tuple[int, int]] = []
        self._layers: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])

    def on_layer(self, j: int) -> Callable[[int], None] | None:
        """Time layers, too; not on a GPU, where the host's times would mean nothing."""
        return None if self._is_cuda else self._enter_layer

    def _enter_layer(self, index: int) -> None:
        now_ns = time.perf_counter_ns()
        if self._layer >= 0:
            self._passed.append((self._layer, now_ns - self._layer_begun_ns))
        self._layer, self._layer_begun_ns = index, now_ns

    def begin_step(self, order: Order) -> None:
        """Start timing a step; drop what a step that failed has left."""
        for recorded in (self._takes, self._sends, self._marks, self._passed, self._layers):
            recorded.clear()
        self._layer = -1
        super().begin_step(order)

    def begin_layers(self, task: Task) -> None:
        """Note when a task starts."""
        if self._is_cuda:
            self._mark()
        super().begin_layers(task)

    def end_task(self, task: Task) -> None:
        """Note that a task has just ended, and the layers that it went through."""
        if self._is_cuda:
            self._mark()
        super().end_task(task)
        if task.kind in (FORWARD, RECOMPUTE):
            for index, took_ns in self._passed:
                sums = self._layers[task.j, index]
                sums[0] += took_ns
                sums[1] += 1
        self._passed.clear()

    def waited(self, transfer: Transfer, tensors: Sequence[Tensor], start_ns: int) -> None:
        """Keep a message that was taken, and the wait for it."""
        now_ns = time.perf_counter_ns()
        super().waited(transfer, tensors, start_ns)
        self._takes.append([*transfer, num_bytes(tensors), start_ns, now_ns])

    def sent(self, transfer: Transfer, tensors: Sequence[Tensor], start_ns: int) -> None:
        """Keep a message that was sent."""
        now_ns = time.perf_counter_ns()
        self._sends.append([*transfer, num_bytes(tensors), start_ns, now_ns])

    def end_step(self, order: Order) -> None:
        """Add the step to the sums."""
        if self._marks:
            self._use_device_times()
        super().end_step(order)

    def last_record(self) -> dict[str, Any]:
        """Return the last step as plain JSON, for ``merging.py``; times since its beginning."""
        begun_ns = self._begun_ns
        return {
            **super().last_record(),
            "takes": [_since(begun_ns, take) for take in self._takes],
            "sends": [_since(begun_ns, send) for send in self._sends],
            "layers": [[*key, *sums] for key, sums in self._layers.items()],
        }

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _use_device_times(self) -> None:
        """Put the device's times of tasks in the place of the host's.

        The last event links both clocks: the device's times count back from it.
        """
        last = self._marks[-1]
        last.synchronize()
        now_ns = time.perf_counter_ns()
        times_ns = [now_ns - round(mark.elapsed_time(last) * 1e6) for mark in self._marks]
        self._events = [
            (task, start_ns, end_ns)
            for (task, _, _), start_ns, end_ns in zip(
                self._events, times_ns[::2], times_ns[1::2], strict=True
            )
        ]


def _since(begun_ns: int, message: list[Any]) -> list[Any]:
    *what, start_ns, end_ns = message
    return [*what, start_ns - begun_ns, end_ns - begun_ns]
