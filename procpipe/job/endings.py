"""How a launched process ends: with its launcher, and without a second, misleading traceback.

When one rank fails, all others raise ``RemoteStageError`` with its traceback, and would print that
once more. So a rank that ends because another failed, or that is interrupted, prints one line:

    procpipe: rank 0 ends, because rank 1 failed in step(): KeyError: 'boom'; it was in B3, …
    procpipe: rank 2 was interrupted in F4, layer 'conv1' (Conv2d), for 0.1 s

The line has the reason because the rank that failed may not print it: ``SystemExit`` and
exceptions that the user catches print nothing. For the launcher, the rank notes the same in a file.

A forked child has these hooks, too, but they do nothing there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol

import psutil

from procpipe.errors import DisagreementError, PeerLostError, RemoteStageError, StageClosedError
from procpipe.job.board import Page
from procpipe.job.grid import Grid
from procpipe.notes import write_note

_PR_SET_PDEATHSIG = 1

_CONNECT_TIMEOUT_S = 2.0

#: Has the number of the process of ``procpipe run`` and the id of its run. Jobs that a rank starts
#: inherit it, and have other ids.
LAUNCHER = "PROCPIPE_LAUNCHER"

#: The name of threads that save in the background, and how long they may keep a process alive.
SAVING_THREAD = "procpipe-save"
_SAVE_TIMEOUT_S = 10.0


def end_with_launcher() -> None:
    """Make the kernel kill this process when its launcher dies.

    Raises:
        ConnectionRefusedError: it has died already, while this process was starting: it is no
            ancestor any more; or its store, which existed before its workers, is gone.
    """
    if (run_id := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher, _, of_run = os.environ.get(LAUNCHER, "").partition(" ")
    if of_run == run_id and int(launcher) not in (each.pid for each in psutil.Process().parents()):
        raise ConnectionRefusedError(f"the launcher, process {launcher}, has ended")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with contextlib.suppress(TimeoutError, socket.gaierror):  # perhaps a slow network
            socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()


class Follower(Protocol):
    """Receives exceptions that end a thread."""

    def thread_raised(self, error: BaseException) -> str:
        """Handle an exception that ends the thread that calls this.

        Returns the line to print instead of its traceback; "" to print that.
        """


def follow_exceptions(follower: Follower) -> None:
    """Call an object's ``thread_raised`` for uncaught exceptions, for as long as it lives."""
    _hooks().followers.add(follower)


class _Hooks:
    """Replaces the two hooks that print tracebacks, once a process."""

    def __init__(self) -> None:
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._pid = os.getpid()
        self._of_main, self._of_threads = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._handle, self._handle_thread

    def _handle(
        self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_handled(error):
            self._of_main(error_type, error, trace)

    def _handle_thread(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None or isinstance(error, SystemExit) or not self._is_handled(error):
            self._of_threads(args)

    def _is_handled(self, error: BaseException) -> bool:
        """Pass an exception on to the followers; print a line if that says it all."""
        if os.getpid() != self._pid:
            return False
        if threading.current_thread() is threading.main_thread():
            # A launcher's Ctrl-C reaches a rank after the failure of another that it interrupted.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        lines = {follower.thread_raised(error) for follower in tuple(self.followers)} - {""}
        if lines:
            write_note("\n".join(lines))
        return bool(lines)


@functools.cache
def _hooks() -> _Hooks:
    return _Hooks()


def error_of_script() -> BaseException | None:
    """Return the exception that has ended the main thread, if one has and was not SystemExit."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def end_at_once(line: str) -> NoReturn:
    """End the process with a line, without Python's own shutdown, which would wait for its device.

    A save in the background may end within 10 s.
    """
    write_note(line)
    deadline_s = time.monotonic() + _SAVE_TIMEOUT_S
    for thread in threading.enumerate():
        if thread.name == SAVING_THREAD:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


def line_of(error: BaseException, reading: Page, first: int = 0) -> str:
    """Return the line to print instead of a traceback; "" to print the traceback.

    ``reading`` says where the rank was. ``first`` is the rank that prints what all have found.
    """
    grid = Grid.of(reading)
    ours = grid.rank_name(reading.rank)
    if isinstance(error, KeyboardInterrupt):
        return f"procpipe: {ours} was interrupted {reading.where()}"
    if isinstance(error, DisagreementError) and reading.rank != first:
        return f"procpipe: {ours} ends, because of the {type(error).__name__} of rank {first}"
    before = error.__context__
    if isinstance(error, StageClosedError) and isinstance(before, RemoteStageError):
        # In a ``finally``: a state.save, for instance, which has saved nothing.
        return f"{line_of(before, reading, first)}; then {error}"
    if not isinstance(error, RemoteStageError):
        return ""
    meanwhile = f"; it was {reading.where()}" if reading.waits_for else ""
    return f"procpipe: {ours} ends, because {_reason(error, grid)}{meanwhile}"


def _reason(error: RemoteStageError, grid: Grid) -> str:
    """Say which other rank failed, and how."""
    if isinstance(error, PeerLostError):
        return error.story
    # The rest of the story's first line: " in step(): KeyError: 'boom'".
    rest = error.story.partition("\n")[0].partition(f"(rank {error.rank}),")[2]
    return f"{grid.rank_name(error.rank)} failed{rest}"


def note_victim(error: BaseException, reading: Page, first: int = 0) -> None:
    """Note for the launcher that another rank is the cause of this one's failure, if it is.

    In ``victim.json``, beside the file in which torchrun's agent looks for an exception. A rank
    that failed in a collective with others, which share its layers, notes these: it may be a
    victim. The other arguments are those of ``line_of``.
    """
    note: dict[str, object] = {}
    if isinstance(error, RemoteStageError):
        note = {"victim_of": error.rank, "because": _reason(error, Grid.of(reading))}
    elif isinstance(error, DisagreementError) and reading.rank != first:
        note = {"victim_of": first, "because": f"rank {first} failed: {type(error).__name__}"}
    elif shared_with := getattr(error, "shared_with", None):
        note = {"shared_with": shared_with}
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if note and file:
        with contextlib.suppress(OSError):
            Path(file).with_name("victim.json").write_text(json.dumps(note), encoding="utf-8")
