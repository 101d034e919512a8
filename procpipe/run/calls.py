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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from procpipe.errors import DisagreementError, ProcpipeError, RemoteStageError, StageClosedError
from procpipe.run.messages import Order
from procpipe.run.pipeline import Pipeline
from procpipe.run.world import World

__all__ = ["Calls"]


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
        atexit.register(self._leave)

    @contextmanager
    def together(self, name: str) -> Iterator[Pipeline]:
        """Make a call; every rank makes the same.

        Raises:
            StageClosedError: an earlier call failed, or the stage was closed.
        """
        if self._ended is not None:
            raise StageClosedError(f"{name}() cannot run: {self._ended}")
        try:
            if self._pipeline is None:
                self._pipeline = self._connect()
            yield self._pipeline
            self._pipeline.flush()
        except BaseException as error:
            self.fail(name, error)
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
        return coordinator.issue(ours) if self._world.rank == 0 else coordinator.follow(ours)

    def fail(self, name: str, error: BaseException) -> None:
        """End the pipeline on every rank because of an error on this one."""
        if self._ended is not None:
            return
        self._ended = f"{name}() failed on this rank with {type(error).__name__}: {error}"
        # The mesh has passed on the failure of another rank; a disagreement is found by each.
        if not isinstance(error, (RemoteStageError, DisagreementError)):
            self._world.give_up(self._story(f"in {name}()", error))
        self._disconnect()

    @property
    def pipeline(self) -> Pipeline | None:
        """The connected pipeline; None before the first call and after the last."""
        return self._pipeline

    def close(self) -> None:
        """Leave once all that was sent has arrived."""
        atexit.unregister(self._leave)
        self._ended = self._ended or "the stage was closed"
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()

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
            print(f"procpipe: rank {self._world.rank} left early: {unfinished}", file=sys.stderr)

    def _disconnect(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.abandon()
        else:
            self._world.close()

    def _story(self, where: str, error: BaseException) -> str:
        rank = self._world.rank
        told = "".join(traceback.format_exception(error))
        return f"stage {rank} (rank {rank}), {where}:\n{told}"
