"""Calls that all ranks make together: connecting before the first, and ending all when one fails.

    with calls.together("step") as pipeline:      connects, or refuses after a failure
        order = calls.order("step", …)            rank 0 issues, the others follow
        pipeline.run(order, batch)
                                                  an exception here reaches every rank

A call that fails on one rank ends with an error on every rank, and no further call can be made:
the ranks no longer know where the others are.
"""

from __future__ import annotations

import atexit
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from procpipe.errors import (
    FOUND_BY_EACH,
    CallMismatchError,
    ProcpipeError,
    RemoteStageError,
    StageClosedError,
)
from procpipe.notes import write_note
from procpipe.run.messages import Order
from procpipe.run.pipeline import Pipeline
from procpipe.run.world import World

__all__ = ["Calls"]

#: Characters of an exception's text that are told in a line.
_LINE_LENGTH = 200

#: Characters of a story, traceback and all, that are told to other ranks.
_STORY_LENGTH = 1 << 16

#: The pipelines of this process: a rank may wait in one while rank 0 is in another.
_all: weakref.WeakSet[Calls] = weakref.WeakSet()


class Calls:
    """One rank's side of the calls of one pipeline.

    Args:
        world: this process's place in the job.
        connect: builds the pipeline at the first call; waits for all ranks.
    """

    def __init__(self, world: World, connect: Callable[[], Pipeline]) -> None:
        self._world = world
        self._connect = connect
        self._pipeline: Pipeline | None = None
        self._ended: str | None = None
        self._has_failed = False
        self._is_victim = False
        atexit.register(self._leave)
        _all.add(self)

    @contextmanager
    def together(self, name: str) -> Iterator[Pipeline]:
        """Make a call; every rank makes the same.

        Raises:
            StageClosedError: an earlier call failed, or the stage was closed.
        """
        if self._ended is not None:
            raise StageClosedError(f"{name}() cannot run: {self._ended}")
        self._world.board.start_call(name)
        try:
            if self._pipeline is None:
                self._pipeline = self._connect()
            yield self._pipeline
            self._pipeline.flush()
            self._world.board.end_call()
        except BaseException as error:
            self.fail(f"{name}()", error)
            raise

    def order(self, call: str, *, is_training: bool, **decided: Any) -> Order:
        """Issue the order of a call on rank 0, and wait for it elsewhere.

        Args:
            call: the method the user called.
            is_training: whether the stage is in training mode; must be the same on every rank.
            decided: what rank 0 decides, see ``Order``.
        """
        assert self._pipeline is not None, "an order is part of a call"
        # A backward pass runs with gradients off on the rank where autograd calls it.
        is_grad_enabled = torch.is_grad_enabled() or call == "backward"
        ours = Order(call, self._world.number, is_training, is_grad_enabled, **decided)
        coordinator = self._pipeline.coordinator
        if self._world.rank == 0:
            return coordinator.issue(ours)
        return coordinator.follow(ours, lambda: self._check_other_pipelines(call))

    def _check_other_pipelines(self, call: str) -> None:
        """Check that rank 0 is not in a call of another pipeline, whose sockets are others."""
        for other in tuple(_all):
            pipeline = other._pipeline
            if other is self or pipeline is None:
                continue
            try:
                order = pipeline.coordinator.waiting()
            except RemoteStageError as error:
                if self._pipeline is not None:
                    self._pipeline.pass_on(error)
                raise
            if order is not None:
                raise CallMismatchError(
                    f"rank {self._world.rank} is in {call}() of its pipeline "
                    f"{self._world.number} while rank 0 is in {order.call}() of pipeline "
                    f"{order.stage_number} (counted from 0 in the order they are made): every rank "
                    "must make the same calls in the same order"
                )

    def fail(self, name: str, error: BaseException) -> None:
        """End the pipeline on every rank because of an error on this one."""
        if self._ended is not None:
            return
        self._world.board.fail()
        self._has_failed = True
        self._ended = f"{name} failed on this rank with {type(error).__name__}: {_text_of(error)}"
        # The mesh has passed on the failure of another rank.
        if isinstance(error, RemoteStageError):
            self._is_victim = True
        elif not isinstance(error, FOUND_BY_EACH):
            self._world.give_up(self._story(f"in {name}", error))
            self._world.record(error)
        self._disconnect()

    @property
    def pipeline(self) -> Pipeline | None:
        """The connected pipeline; None before the first call and after the last."""
        return self._pipeline

    @property
    def has_failed(self) -> bool:
        """Whether a call failed, on this rank or on another; may be asked by any thread."""
        return self._has_failed

    def close(self) -> None:
        """Leave once all that was sent has arrived."""
        atexit.unregister(self._leave)
        self._ended = self._ended or "the stage was closed"
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
        else:
            self._world.close()

    def _leave(self) -> None:
        """Leave as the interpreter ends; an exception that ended the script is told to all."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and self._ended is None:
            self.fail("the script", error)
        elif self._pipeline is None and self._ended is None:
            self._world.give_up(f"rank {self._world.rank} ended its script before its first call")
        try:
            self.close()
        except ProcpipeError as unfinished:
            write_note(f"procpipe: rank {self._world.rank} left early: {unfinished}")
        if self._is_victim:
            self._world.let_others_end_first()

    def _disconnect(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.abandon()
        else:
            self._world.close()

    def _story(self, where: str, error: BaseException) -> str:
        rank = self._world.rank
        told = "".join(traceback.format_exception(error))
        if len(told) > _STORY_LENGTH:  # all peers are to have it before this process ends
            half = _STORY_LENGTH // 2
            told = f"{told[:half]}\n… {len(told) - 2 * half} characters …\n{told[-half:]}"
        return f"stage {rank} (rank {rank}), {where}: {_in_a_line(error)}\n{told}"


def _text_of(error: BaseException) -> str:
    """Return what an exception says; a user's may fail at that."""
    try:
        return str(error)
    except Exception as another:
        return f"(what it says is not known: its __str__ raised {type(another).__name__})"


def _in_a_line(error: BaseException) -> str:
    """Return an exception's type and the first line of what it says."""
    lines = _text_of(error).splitlines() or [""]
    line = lines[0] if len(lines[0]) <= _LINE_LENGTH else f"{lines[0][:_LINE_LENGTH]}…"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
