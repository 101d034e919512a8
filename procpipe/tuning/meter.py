"""Every rank's part in ``schedule="auto"``: it measures the steps that rank 0's orders ask it to.

    order.detail   {"schedule": name, "tells": "bytes" | "seconds" | "whole" | ""}
    the step       with a look at what is saved and held, or with none but the trace's
    afterwards     the ranks' reports ── control.agree ──> AutoSchedule.heard on rank 0

What layers save for their backward pass is counted by hooks, which make a step slower; so that is
done in steps whose seconds do not count. Times are those of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from procpipe.compute.saved import SavedTensors
from procpipe.errors import MemoryLimitError
from procpipe.plan.task import FORWARD, INPUT_GRADIENT, RECOMPUTE, Task
from procpipe.run.control import Control
from procpipe.run.executor import Executor
from procpipe.run.messages import Order
from procpipe.tuning.auto import BYTES, NOTHING
from procpipe.tuning.step_costs import ROOTS, Report, report_of_times


class Meter:
    """Measures this stage's steps.

    Args:
        executor: runs them.

    Attributes:
        schedule: the name of the newest step's plan, if rank 0 told one.
    """

    def __init__(self, executor: Executor) -> None:
        self.schedule = ""
        self._executor = executor
        self._saved: dict[tuple[int, int], int] = {}  # by micro-batch and partition
        self._put_off: dict[tuple[int, int], int] = {}

    @contextmanager
    def watching(self, order: Order) -> Iterator[None]:
        """Measure what is run within as an order asks."""
        if order.call == "step" and order.detail:
            self.schedule = order.detail["schedule"]
        if _tells(order) != BYTES:
            yield
            return
        self._saved, self._put_off = {}, {}
        self._executor.around, self._executor.ledger.seen = self._around, {}
        try:
            yield
        finally:
            self._executor.around = None

    def tell(self, order: Order, control: Control, heard: Callable[[list[Any]], Any]) -> None:
        """Tell rank 0 what the step was measured to take, if its order asks; waits for all ranks.

        Args:
            order: the step's.
            control: the line to rank 0.
            heard: on rank 0, takes all reports and returns what stages lack of memory, if any do.

        Raises:
            MemoryLimitError: no plan keeps the limits; raised on every rank.
        """
        tells = _tells(order)
        if tells == NOTHING:
            return
        report = self._report_of_bytes() if tells == BYTES else self._report_of_times()
        lacks = control.agree(asdict(report), heard)
        if lacks:
            raise MemoryLimitError(lacks)

    def _report_of_times(self) -> Report:
        tasks = [(t.task, t.start_s, t.end_s) for t in self._executor.trace.last_step()]
        return report_of_times(tasks, self._executor.trace.last_step_s)

    def _report_of_bytes(self) -> Report:
        largest: dict[tuple[str, int, int], int] = {}
        seen, self._executor.ledger.seen = self._executor.ledger.seen, None
        for key, size in (seen or {}).items():
            kind, source, destination = _message(key)
            place = kind, source, destination
            largest[place] = max(size, largest.get(place, 0))
        sizes = [(*place, size) for place, size in largest.items()]
        saved, put_off = (
            [(j, size) for (_, j), size in found.items()] for found in (self._saved, self._put_off)
        )
        return Report(sizes=sizes, saved=saved, put_off=put_off)

    @contextmanager
    def _around(self, task: Task) -> Iterator[None]:
        kind, i, j = task
        partition = self._executor.partitions[j]
        if kind in (FORWARD, RECOMPUTE):
            saved = SavedTensors()
            with saved.hooks():
                yield
            # What a first forward saves is gone where there is a second; that one counts.
            self._saved[i, j] = saved.num_bytes(partition.tensors_of(i))
        else:
            yield
            if kind == INPUT_GRADIENT:
                self._put_off[i, j] = partition.put_off_bytes(i)


def _tells(order: Order) -> str:
    return order.detail["tells"] if order.call == "step" and order.detail else NOTHING


def _message(key: Sequence[Any]) -> tuple[str, int, int]:
    """Return kind, source and destination of what the ledger has under a key."""
    if key[0] == ROOTS:
        _, j, _ = key
        return ROOTS, j, j
    kind, source, destination, _ = key
    return kind, source, destination
