"""The interface to follow a stage's work: board, times, recording.

    begin_step(order)
        begin_task(task)           it begins; its inputs may not have arrived yet
            waited(transfer, …)    for each message that it takes from another stage
        begin_layers(task)
            on_layer(j)(index)     for each layer
        end_task(task)
        sent(transfer, …)
    begin_sum(what, …)             for each sum over replicas
    ask_sum(what)                  the stage begins to wait for it
    added_up(what, …)              and has it
    end_step(order)                or abandon_step(), if it failed

An observer overrides what it needs. An event of a task or a message that none
overrides costs an empty call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.messages import Order


class Observer:
    """Does nothing at each event; subclasses override some."""

    # -- of the pipeline ------------------------------------------------------------------------

    def connected(self) -> None:
        """All ranks are connected; called on rank 0, while the others wait."""

    def finish(self) -> None:
        """The pipeline closes after a good end: all was sent, and every rank calls this."""

    def leave(self) -> None:
        """The pipeline is disconnected, after a good end or a failure; must not raise."""

    # -- of a step ------------------------------------------------------------------------------

    def begin_step(self, order: Order) -> None:
        """The program of an order begins."""

    def end_step(self, order: Order) -> None:
        """The program has run to its end."""

    def abandon_step(self) -> None:
        """The program failed, perhaps within a task."""

    # -- of a task ------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """The task begins; its inputs may not have arrived yet."""

    def begin_layers(self, task: Task) -> None:
        """The task has all that it takes, and its layers run next."""

    def end_task(self, task: Task) -> None:
        """The task's layers have run."""

    def on_layer(self, j: int) -> Callable[[int], None] | None:
        """Return what is called with each layer of partition ``j`` that is entered, -1 for none."""

    # -- of a message ---------------------------------------------------------------------------

    def waited(self, transfer: Transfer, tensors: Sequence[Tensor], start_ns: int) -> None:
        """A message was taken just now, for which the stage had waited since ``start_ns``."""

    def sent(self, transfer: Transfer, tensors: Sequence[Tensor], start_ns: int) -> None:
        """A message was sent just now; sending it began at ``start_ns``."""

    # -- of replicas ----------------------------------------------------------------------------

    def begin_sum(self, what: str, wait: Callable[[], None] | None) -> None:
        """A sum over replicas (an all-reduce) has begun, or begins next.

        Args:
            what: "gradients 0" for the first bucket, "loss", …
            wait: makes the current stream wait for it, if it is queued on a GPU; else None.
        """

    def ask_sum(self, what: str) -> None:
        """The stage begins to wait for a sum; not called if it has waited from the beginning."""

    def added_up(
        self, what: str, num_bytes: int, begun_ns: int, ended_ns: int, asked_ns: int
    ) -> None:
        """A sum was taken just now, by the host.

        Args:
            what: see ``begin_sum``.
            num_bytes: of its tensor.
            begun_ns: when this stage began it.
            ended_ns: when this stage first saw that it was over.
            asked_ns: since when the stage had waited for it.
        """


class _Hooks(tuple[Callable[..., None], ...]):
    """Functions that are called one after the other, all with the same arguments."""

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        for hook in self:
            hook(*args)


class Observers:
    """Several observers; for each event of tasks and messages, the methods that are overridden."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.all = tuple(observers)
        self.begin_task = self._overridden("begin_task")
        self.begin_layers = self._overridden("begin_layers")
        self.end_task = self._overridden("end_task")
        self.waited = self._overridden("waited")
        self.sent = self._overridden("sent")
        self.begin_sum = self._overridden("begin_sum")
        self.ask_sum = self._overridden("ask_sum")
        self.added_up = self._overridden("added_up")

    def on_layer(self, j: int) -> Callable[[int], None]:
        """Return one function for all that is called with each layer of partition ``j``."""
        return _as_one(filter(None, [each.on_layer(j) for each in self.all]))

    @contextmanager
    def step(self, order: Order) -> Iterator[None]:
        """Call what begins and ends a step around it."""
        for each in self.all:
            each.begin_step(order)
        try:
            yield
        except BaseException:
            for each in self.all:
                each.abandon_step()
            raise
        for each in self.all:
            each.end_step(order)

    @contextmanager
    def awaited_sum(self, what: str, num_bytes: int) -> Iterator[None]:
        """Surround a sum that the stage waits for from its beginning."""
        begun_ns = time.perf_counter_ns()
        self.begin_sum(what, None)
        yield
        self.added_up(what, num_bytes, begun_ns, time.perf_counter_ns(), begun_ns)

    def _overridden(self, name: str) -> Any:  # a function, which mypy takes to be true
        unused = getattr(Observer, name)
        return _as_one(
            getattr(each, name) for each in self.all if getattr(type(each), name) is not unused
        )


def _as_one(hooks: Iterable[Callable[..., None]]) -> Callable[..., None]:
    """Return what calls them all; one alone as it is, and something false for none."""
    found = _Hooks(hooks)
    return found[0] if len(found) == 1 else found
