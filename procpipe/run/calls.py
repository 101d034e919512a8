"""Calls that all ranks make together, and how all of them end when one fails.

    with calls.together("step") as pipeline:            refuses after a failure
        order = coordinator.begin(Order("step", …))     is every rank in this call?
        pipeline.run(order, batch)
                                                        an exception here reaches every rank

After a call that fails on one rank no further call can be made: the ranks are at different places.
A script that fails between two calls does the same, and one that ends leaves the pipeline. All
calls come from the thread that made the stage.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from procpipe.errors import DisagreementError, ProcpipeError, RemoteStageError, StageClosedError
from procpipe.job.endings import (
    end_at_once,
    error_of_script,
    follow_exceptions,
    line_of,
    note_victim,
)
from procpipe.job.world import World
from procpipe.notes import write_note
from procpipe.run.faults import in_a_line, story_of
from procpipe.run.runner import Runner


class Calls:
    """One rank's side of the calls of one pipeline.

    ``build`` makes the pipeline at the first call, and waits for all ranks.

    Attributes:
        pipeline: the built pipeline; None before the first call and after the last.
        has_failed: whether a call failed, on this rank or on another; any thread may read it.
    """

    def __init__(self, world: World, build: Callable[[], Runner]) -> None:
        self._world = world
        self._build: Callable[[], Runner] | None = build
        self.pipeline: Runner | None = None
        self._ended = ""  # why
        self.has_failed = False
        self._is_victim = False
        self._thread = threading.current_thread()
        self._pid = os.getpid()
        atexit.register(self._leave)
        if world.num_ranks > 1:
            follow_exceptions(self)

    @property
    def ended(self) -> str:
        """Why no further call can be made, in a line; "" while one can."""
        return " ".join(self._ended.partition("\nTraceback")[0].split("\n"))

    @contextmanager
    def together(self, name: str) -> Iterator[Runner]:
        """Make a call; every rank makes the same.

        Raises:
            StageClosedError: an earlier call failed, the stage was closed, or this process was
                forked from the one that built it.
            RuntimeError: another thread than the stage's calls.
        """
        self._check_caller(name)
        self._world.board.start_call(name)
        try:
            if self.pipeline is None:
                assert self._build is not None, "it has not ended"
                self.pipeline = self._build()
            yield self.pipeline
            self._check_caller(name)  # it may have been closed, or forked by a layer
            self.pipeline.wires.flush()
            self._world.board.end_call()
        except BaseException as error:
            self.fail(f"{name}()", error)
            raise

    def _check_caller(self, name: str) -> None:
        if os.getpid() != self._pid:
            raise StageClosedError(
                f"{name}() cannot run: this process ({os.getpid()}) was forked from that of rank "
                f"{self._world.grid.job_rank} ({self._pid}): only that one can use its stage"
            )
        if self._ended:
            raise StageClosedError(f"{name}() cannot run: {self._ended}")
        # Autograd calls a backward pass in a thread of its own for each GPU.
        if threading.current_thread() is not self._thread and name != "backward":
            raise RuntimeError(
                f"{name}() is called in thread {threading.current_thread().name!r}, but the stage "
                f"was made in {self._thread.name!r}: make all calls of a stage in the thread that "
                "makes the stage"
            )

    def fail(self, name: str, error: BaseException) -> None:
        """End the pipeline on every rank because of an error on this one."""
        if self._ended or os.getpid() != self._pid:
            return
        self.has_failed = True
        self._ended = f"{name} failed on this rank with {type(error).__name__}: {error!s}"
        self._world.board.fail()
        note_victim(error, self._world.board.read(), self._world.grid.numbers[0])
        try:
            if isinstance(error, RemoteStageError):
                self._world.mesh.fail(error)  # new to ranks of this pipeline if it is of another
                self._is_victim = True
            elif not isinstance(error, DisagreementError):
                who = self._world.grid.name_of(self._world.rank)
                story = f"{who}, in {name}: {in_a_line(error)}\n{story_of(error)}"
                self._world.give_up(story, error)
        finally:
            self._disconnect(Runner.abandon)

    def close(self) -> None:
        """Leave once all that was sent has arrived."""
        if os.getpid() == self._pid:
            atexit.unregister(self._leave)
            self._ended = self._ended or "the stage was closed"
            self._disconnect(Runner.close)

    def _disconnect(self, close: Callable[[Runner], None]) -> None:
        pipeline, self.pipeline = self.pipeline, None
        self._build = None  # it holds the model, and atexit this object
        if pipeline is not None:
            close(pipeline)
        else:
            self._world.close()

    # -- the end of the script ------------------------------------------------------------------

    def thread_raised(self, error: BaseException) -> str:
        """Fail because of an exception that ends the thread which makes the calls.

        Returns a line to print instead of the traceback of an error that began elsewhere, or "".
        """
        here = threading.current_thread()
        if here is self._thread:
            is_main = here is threading.main_thread()
            self.fail("the script" if is_main else f"thread {here.name!r}", error)
        return line_of(error, self._world.board.read(), self._world.grid.numbers[0])

    def _leave(self) -> None:
        """Leave as the interpreter ends; send an exception that ended the script to all ranks."""
        if os.getpid() != self._pid:
            return
        error = error_of_script()
        if error is not None:
            self.fail("the script", error)
        name = self._world.grid.rank_name(self._world.rank)
        try:
            self.close()
        except ProcpipeError as unfinished:
            write_note(f"procpipe: {name} left early: {unfinished}")
        if self._is_victim:
            self._world.let_others_end_first()
        if self.has_failed and self._world.transports.busy_with():
            end_at_once(f"procpipe: {name} ends without waiting for its device")
