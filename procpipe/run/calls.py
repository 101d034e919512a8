"""Calls that all ranks make together: connecting before the first, and ending all when one fails.

    with calls.together("step") as pipeline:      connects, or refuses after a failure
        order = calls.issue_or_follow("step", …)  on rank 0, on the others
        pipeline.run(order, batch)
                                                  an exception here reaches every rank

A call that fails on one rank ends with an error on every rank, and no further call can be made:
the ranks are at different places then. A script that fails between two calls does the same.

What happens at the end of a script is in ``leaving.py``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from procpipe.errors import FOUND_BY_EACH, PeerLostError, RemoteStageError, StageClosedError
from procpipe.forks import give_up_in_children, keep_for_ever
from procpipe.job.world import World
from procpipe.run.leaving import Leaving, pipelines
from procpipe.run.messages import Order
from procpipe.run.pipeline import Pipeline
from procpipe.run.stories import in_a_line, story_of, text_of
from procpipe.signals import put_off


class Calls(Leaving):
    """One rank's side of the calls of one pipeline.

    ``connect`` builds the pipeline at the first call, and waits for all ranks.
    """

    def __init__(self, world: World, connect: Callable[[], Pipeline]) -> None:
        self._world = world
        self._connect = connect
        self._pipeline: Pipeline | None = None
        self._ended: str | None = None
        self._has_failed = False
        self._is_victim = False
        self._has_called = False
        self._caller = threading.current_thread()
        self.leave_at_the_end()
        give_up_in_children(self)

    @contextmanager
    def together(self, name: str) -> Iterator[Pipeline]:
        """Make a call; every rank makes the same.

        Raises:
            StageClosedError: an earlier call failed, the stage was closed, or this process was
                forked from the one that built it.
        """
        self._caller = self._world.caller = threading.current_thread()
        self._has_called = True
        if self._ended is not None:
            raise StageClosedError(f"{name}() cannot run: {self._ended}")
        self._world.board.start_call(name)
        try:
            if self._pipeline is None:
                self._pipeline = self._connect()
            yield self._pipeline
            if self._pipeline is None:  # closed meanwhile, or this is a child that a layer forked
                raise StageClosedError(f"{name}() cannot go on: {self._ended}")
            self._pipeline.flush()
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
        assert self._pipeline is not None, "an order is part of a call"
        # A backward pass runs with gradients off on the rank where autograd calls it.
        is_grad_enabled = torch.is_grad_enabled() or call == "backward"
        ours = Order(call, self._world.number, is_training, is_grad_enabled, **decided)
        coordinator = self._pipeline.coordinator
        if self._world.rank == 0:
            return coordinator.issue(ours)
        return coordinator.follow(ours, lambda: self._check_other_pipelines(ours))

    def _check_other_pipelines(self, ours: Order) -> None:
        """Check that rank 0 is not in a call of another pipeline, whose sockets are others."""
        for other in tuple(pipelines):
            pipeline = other._pipeline
            if other is self or pipeline is None:
                continue
            try:
                order = pipeline.coordinator.waiting()
            except RemoteStageError as error:
                if self._pipeline is not None:
                    if isinstance(error, PeerLostError):  # this one's own error says more
                        self._pipeline.wires.mesh.wait_failure()
                    self._pipeline.pass_on(error)
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
        self._has_failed = True
        self._ended = f"{name} failed on this rank with {said}"
        self._world.transports.stop_watching_device()
        self._world.board.fail()
        try:
            # The mesh has sent on the failure of another rank.
            if isinstance(error, RemoteStageError):
                self._is_victim = True
            elif not isinstance(error, FOUND_BY_EACH):
                self._world.give_up(self._story(f"in {name}", error))
                self._world.record(error)
        finally:
            self._disconnect()

    @property
    def pipeline(self) -> Pipeline | None:
        """The connected pipeline; None before the first call and after the last."""
        return self._pipeline

    def close(self) -> None:
        """Leave once all that was sent has arrived."""
        self.leave_no_more()
        self._ended = self._ended or "the stage was closed"
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
        else:
            self._world.close()

    def give_up_in_child(self) -> None:
        """Refuse the calls of a forked child, whose end is no failure."""
        self.leave_no_more()
        pipelines.discard(self)
        keep_for_ever(self._pipeline)  # transfers may be under way
        self._pipeline = None
        self._ended = self._ended or (
            f"this process ({os.getpid()}) was forked from that of rank {self._world.job_rank} "
            f"({os.getppid()}): only that one can use its stage"
        )

    def _disconnect(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.abandon()
        else:
            self._world.close()

    def _story(self, where: str, error: BaseException) -> str:
        name = self._world.grid.name_of(self._world.rank)
        return f"{name}, {where}: {in_a_line(error)}\n{story_of(error)}"
