"""Calls that all ranks make together: connecting before the first, and ending all when one fails.

    with calls.together("step") as pipeline:      connects, or refuses after a failure
        order = calls.issue_or_follow("step", …)  on rank 0, on the others
        pipeline.run(order, batch)
                                                  an exception here reaches every rank

A call that fails on one rank ends with an error on every rank, and no further call can be made:
the ranks are at different places then. A script that fails between two calls does the same.

A script that ends leaves the pipeline: when its last thread ends (``atexit``), or when its main
thread does and no other makes the calls, at once after an exception, otherwise after a moment.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from procpipe.errors import (
    FOUND_BY_EACH,
    PeerLostError,
    ProcpipeError,
    RemoteStageError,
    StageClosedError,
)
from procpipe.forks import give_up_in_children, keep_for_ever
from procpipe.job.endings import end_at_once, error_of_script, watch_threads
from procpipe.job.world import World
from procpipe.notes import write_note
from procpipe.run.faults import in_a_line, story_of, text_of
from procpipe.run.messages import Order
from procpipe.run.pipeline import Pipeline
from procpipe.signals import put_off

#: How long after the end of the main thread, which made the calls so far, another may make the
#: next one; and how long if there was none.
_NEXT_CALL_S, _FIRST_CALL_S = 1.0, 10.0

#: Taken by the thread that leaves, as the script ends.
_leaving = threading.Lock()

#: The pipelines of this process: a rank may wait in one while rank 0 is in another.
_pipelines: weakref.WeakSet[Calls] = weakref.WeakSet()


class Calls:
    """One rank's side of the calls of one pipeline.

    ``connect`` builds the pipeline at the first call, and waits for all ranks.

    Attributes:
        pipeline: the connected pipeline; None before the first call and after the last.
        has_failed: whether a call failed, on this rank or on another; any thread may read it.
    """

    def __init__(self, world: World, connect: Callable[[], Pipeline]) -> None:
        self._world = world
        self._connect = connect
        self.pipeline: Pipeline | None = None
        self._ended: str | None = None
        self.has_failed = False
        self._is_victim = False
        self._has_called = False
        self._caller = threading.current_thread()
        atexit.register(self._leave)
        _pipelines.add(self)
        if world.num_ranks > 1:
            watch_threads(_thread_raised, _main_thread_ended, _any_has_failed)
        give_up_in_children(self)

    @property
    def ended(self) -> str:
        """Why no further call can be made, in a line; "" while one can."""
        return " ".join((self._ended or "").partition("\nTraceback")[0].split("\n"))

    @contextmanager
    def together(self, name: str) -> Iterator[Pipeline]:
        """Make a call; every rank makes the same.

        Raises:
            StageClosedError: an earlier call failed, the stage was closed, or this process was
                forked from the one that built it.
        """
        self._caller = self._world.transports.caller = threading.current_thread()
        self._has_called = True
        if self._ended is not None:
            raise StageClosedError(f"{name}() cannot run: {self._ended}")
        self._world.board.start_call(name)
        try:
            if self.pipeline is None:
                self.pipeline = self._connect()
            yield self.pipeline
            if self.pipeline is None:  # closed meanwhile, or this is a child that a layer forked
                raise StageClosedError(f"{name}() cannot go on: {self._ended}")
            self.pipeline.flush()
            self._world.board.end_call()
        except BaseException as error:
            try:
                self.fail(f"{name}()", error)
            finally:
                if self._ended is None:  # handlers of signals raised faster than it begins
                    self.fail(f"{name}()", error)
            raise

    def issue_or_follow(self, call: str, *, is_training: bool, **decided: Any) -> Order:
        """Issue the order of a call, by its method's name, on rank 0, and wait for it elsewhere.

        ``decided`` is what rank 0 decides, see ``Order``.
        """
        assert self.pipeline is not None, "an order is part of a call"
        # A backward pass runs with gradients off on the rank where autograd calls it.
        is_grad_enabled = torch.is_grad_enabled() or call == "backward"
        ours = Order(call, self._world.number, is_training, is_grad_enabled, **decided)
        coordinator = self.pipeline.coordinator
        if self._world.rank == 0:
            return coordinator.issue(ours)
        return coordinator.follow(ours, lambda: self._check_other_pipelines(ours))

    def _check_other_pipelines(self, ours: Order) -> None:
        """Check that rank 0 is not in a call of another pipeline, whose sockets are others."""
        for other in tuple(_pipelines):
            pipeline = other.pipeline
            if other is self or pipeline is None:
                continue
            try:
                order = pipeline.coordinator.waiting()
            except RemoteStageError as error:
                if self.pipeline is not None:
                    if isinstance(error, PeerLostError):  # this one's own error says more
                        self.pipeline.wires.mesh.wait_failure()
                    self.pipeline.wires.mesh.send_failure(error)
                raise
            if order is not None:
                pipeline.coordinator.check(ours, order)

    def fail(self, name: str, error: BaseException) -> None:
        """End the pipeline on every rank because of an error on this one."""
        while self._ended is None:
            try:
                with put_off():
                    self._fail(name, error)
            except BaseException:  # of a signal's handler; if it came too early, once more
                if self._ended is not None:
                    raise

    def _fail(self, name: str, error: BaseException) -> None:
        said = f"{type(error).__name__}: {text_of(error)}"
        self.has_failed = True
        self._ended = f"{name} failed on this rank with {said}"
        self._world.transports.stop_watching_device()
        self._world.board.fail()
        try:
            # The mesh has sent on the failure of another rank.
            if isinstance(error, RemoteStageError):
                self._is_victim = True
            elif not isinstance(error, FOUND_BY_EACH):
                who = self._world.grid.name_of(self._world.rank)
                self._world.give_up(f"{who}, in {name}: {in_a_line(error)}\n{story_of(error)}")
                self._world.record(error)
        finally:
            self._disconnect(Pipeline.abandon)

    def close(self) -> None:
        """Leave once all that was sent has arrived."""
        atexit.unregister(self._leave)
        self._ended = self._ended or "the stage was closed"
        self._disconnect(Pipeline.close)

    def give_up_in_child(self) -> None:
        """Refuse the calls of a forked child, whose end is not a failure."""
        atexit.unregister(self._leave)
        _pipelines.discard(self)
        keep_for_ever(self.pipeline)  # transfers may be under way
        self.pipeline = None
        self._ended = self._ended or (
            f"this process ({os.getpid()}) was forked from that of rank "
            f"{self._world.grid.job_rank} ({os.getppid()}): only that one can use its stage"
        )

    def _disconnect(self, close: Callable[[Pipeline], None]) -> None:
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            close(pipeline)
        else:
            self._world.close()

    # -- the end of the script ------------------------------------------------------------------

    def _leave(self) -> None:
        """Leave as the interpreter ends; send an exception that ended the script to all ranks."""
        with _leaving:
            error = error_of_script()
            if error is not None and self._ended is None:
                self.fail("the script", error)
            self._send_goodbye(is_new=self.pipeline is None and self._ended is None)
        if self._is_victim:
            self._world.let_others_end_first()
        if self._world.transports.is_device_stuck:
            end_at_once(f"rank {self._world.grid.job_rank}")

    def _send_goodbye(self, *, is_new: bool) -> None:
        if is_new:
            name = self._world.grid.rank_name(self._world.rank)
            self._world.give_up(f"{name} ended its script before its first call")
        try:
            self.close()
        except ProcpipeError as unfinished:
            name = self._world.grid.rank_name(self._world.rank)
            write_note(f"procpipe: {name} left early: {unfinished}")

    def _is_used_by_another_thread(self) -> bool:
        """Whether another thread than the main one and this one made the last call, and runs."""
        caller = self._caller
        if caller in (threading.main_thread(), threading.current_thread()):
            return False
        return caller.is_alive() and not isinstance(caller, threading._DummyThread)

    def _thread_raised(self, error: BaseException) -> None:
        """Fail because of an exception that ends this thread, if it makes the calls."""
        here = threading.current_thread()
        if here is threading.main_thread():
            if not self._is_used_by_another_thread():
                self.fail("the script", error)
        elif here is self._caller:
            self.fail(f"thread {here.name!r}", error)

    def _leave_unless_called(self, waited_s: float) -> None:
        """Leave, some time after the end of the main thread, unless another makes the calls."""
        limit_s = _NEXT_CALL_S if self._has_called else _FIRST_CALL_S
        if self._ended is not None or waited_s < limit_s or self._is_used_by_another_thread():
            return
        with _leaving:
            if self._ended is None:
                self._ended = (
                    f"the main thread has ended, and for {limit_s:.0f} s no other thread made a "
                    "call, so this rank has left the pipeline: join() the threads that use the "
                    "stage at the end of the script"
                )
                if self._is_used_by_another_thread():  # it has just begun
                    self._ended = None
                else:
                    self._send_goodbye(is_new=self.pipeline is None)


def _thread_raised(error: BaseException) -> None:
    """Send the peers of all pipelines an exception that ends this thread."""
    for calls in tuple(_pipelines):
        calls._thread_raised(error)


def _main_thread_ended(waited_s: float) -> None:
    """Leave the pipelines that no other thread uses."""
    for calls in tuple(_pipelines):
        calls._leave_unless_called(waited_s)


def _any_has_failed() -> bool:
    """Whether a pipeline of this process has failed."""
    return any(calls.has_failed for calls in tuple(_pipelines))
