"""How a script that ends leaves its pipelines.

A script that ends leaves the pipeline: when its last thread ends (``atexit``), or when its main
thread does and no other makes the calls, at once after an exception, otherwise after a moment.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

from procpipe.errors import ProcpipeError
from procpipe.job.endings import end_at_once, error_of_script, watch_threads
from procpipe.job.world import World
from procpipe.notes import write_note
from procpipe.run.pipeline import Pipeline

#: How long after the end of the main thread, which made the calls so far, another may make the
#: next one; and how long if there was none.
_NEXT_CALL_S, _FIRST_CALL_S = 1.0, 10.0

#: Taken by the thread that leaves, as the script ends.
_leaving = threading.Lock()

#: The pipelines of this process: a rank may wait in one while rank 0 is in another.
pipelines: weakref.WeakSet[Leaving] = weakref.WeakSet()


class Leaving:
    """The calls of one pipeline, at the end of the script; see ``calls.py`` for the rest."""

    _world: World
    _pipeline: Pipeline | None
    _caller: threading.Thread
    _ended: str | None
    _has_failed: bool
    _is_victim: bool
    _has_called: bool
    close: Callable[[], None]
    fail: Callable[[str, BaseException], None]

    @property
    def has_failed(self) -> bool:
        """Whether a call failed, on this rank or on another; may be asked by any thread."""
        return self._has_failed

    def leave_at_the_end(self) -> None:
        """Leave when the script ends."""
        atexit.register(self._leave)
        pipelines.add(self)
        if self._world.num_ranks > 1:
            watch_threads(_thread_raised, _main_thread_ended, _any_has_failed)

    def leave_no_more(self) -> None:
        """Do nothing as the interpreter ends: the pipeline is closed."""
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Leave as the interpreter ends; send an exception that ended the script to all ranks."""
        with _leaving:
            error = error_of_script()
            if error is not None and self._ended is None:
                self.fail("the script", error)
            self._send_goodbye(is_new=self._pipeline is None and self._ended is None)
        if self._is_victim:
            self._world.let_others_end_first()
        if self._world.transports.is_device_stuck:
            end_at_once(f"rank {self._world.job_rank}")

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

    def thread_raised(self, error: BaseException) -> None:
        """Fail because of an exception that ends this thread, if it makes the calls."""
        here = threading.current_thread()
        if here is threading.main_thread():
            if not self._is_used_by_another_thread():
                self.fail("the script", error)
        elif here is self._caller:
            self.fail(f"thread {here.name!r}", error)

    def leave_unless_called(self, waited_s: float) -> None:
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
                    self._send_goodbye(is_new=self._pipeline is None)


def _thread_raised(error: BaseException) -> None:
    """Send the peers of all pipelines an exception that ends this thread."""
    for calls in tuple(pipelines):
        calls.thread_raised(error)


def _main_thread_ended(waited_s: float) -> None:
    """Leave the pipelines that no other thread uses."""
    for calls in tuple(pipelines):
        calls.leave_unless_called(waited_s)


def _any_has_failed() -> bool:
    """Whether a pipeline of this process has failed."""
    return any(calls.has_failed for calls in tuple(pipelines))
