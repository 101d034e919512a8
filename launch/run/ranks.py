"""Follows the rank processes of this host: their boards, and how each one ends.

    main thread: torch's agent        this thread
    begin(logs of an attempt) ──────> finds the agent's children by their environment
    starts the processes              maps their boards
    …                                 waits for the end of any (pidfd), and at the first failure
    reaps them                        reads all boards

The agent reports exit codes only at the very end, without the order of the failures, and none of an
attempt that it restarts. The kernel reports each end at once: so this thread knows the order, and
what every other rank was doing at that moment. If the agent's thread may reap a process before this
thread runs, the handler of SIGCHLD looks first (``look_before_agent``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from procpipe.job.board import Board, Page

#: How often to look while processes start, afterwards, and for newer boards.
_LOOK_FAST_S = 0.01
_LOOK_S = 0.25
_LOOK_AGAIN_S = 2.0

#: How much of the end of a rank's standard error is read.
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Logs:
    """The files of one rank in one attempt."""

    rank: int
    stdout: Path
    stderr: Path
    error: Path  # the exception that it recorded for torch's agent, if any


@dataclass(frozen=True)
class Recorded:
    """An exception that a rank recorded: it was not a victim of another rank's failure."""

    message: str  # type and text
    traceback: str  # all of it, with notes
    at_s: float  # when, by the wall clock


@dataclass
class Rank:
    """A rank process: what is known about it, and how it ended."""

    logs: Logs  # its files
    pid: int | None = None  # its process; None until that is found
    descriptor: int | None = None  # of that process, to wait for its end
    board: Board | None = None  # what it is doing
    has_ended: bool = False  # whether it has
    #: Its exit code, or minus the number of the signal that ended it; None if unknown.
    code: int | None = None
    at_s: float | None = None  # when it ended, by the wall clock; None if unknown
    reading: Page | None = None  # its board when the first rank failed; None if it had none
    recorded: Recorded | None = None  # its own exception
    stderr: str = ""  # the end of its standard error
    rss_bytes: int = 0  # its memory when last looked at

    @property
    def number(self) -> int:
        """Its rank."""
        return self.logs.rank


@dataclass
class Attempt:
    """One start of all ranks of this host: the first, a restart, or with other hosts."""

    num_ranks: int  # the number of ranks on all hosts
    ranks: tuple[Rank, ...]  # those of this host
    began_s: float = field(default_factory=time.monotonic)  # when, on the monotonic clock
    failed_s: float | None = None  # when the first of them failed, likewise; None if none did

    def ends(self, codes: Mapping[int, int] | None = None) -> list[Rank]:
        """Return how each rank ended; the agent's ``codes`` by rank replace unknown ones."""
        codes = codes or {}
        return [
            replace(
                rank,
                code=codes.get(rank.number) if rank.code is None else rank.code,
                reading=rank.reading or _last_reading(rank),
                recorded=_read_recorded(rank.logs.error),
                stderr=_read_tail(rank.logs.stderr),
            )
            for rank in self.ranks
        ]


class Ranks:
    """Follows the rank processes of this host, in a thread of its own.

    They may take ``grace_s`` to end after another has failed, or after a signal.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._signalled_s = math.inf
        self.attempt: Attempt | None = None  # the newest
        self._looked_s = 0.0
        self._poller = select.poll()
        self._wakes = os.eventfd(0)
        self._poller.register(self._wakes, select.POLLIN)
        self._is_stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="procpipe ranks", daemon=True)
        self._thread.start()

    def begin(self, logs: Sequence[Logs], num_ranks: int) -> None:
        """Begin an attempt; the calling thread starts its processes next."""
        with self._lock:
            self._look()
            self.attempt = Attempt(num_ranks, tuple(map(Rank, logs)))
        os.eventfd_write(self._wakes, 1)

    def look_before_agent(self) -> None:
        """Look now, in the handler of SIGCHLD: then the agent's thread has not reaped the child.

        Once it has, nobody knows the exit code, and a good end looks like a failure.
        """
        if self._lock.acquire(timeout=_LOOK_S):  # not if the signal came during ``begin``
            try:
                with contextlib.suppress(OSError, psutil.Error):
                    self._look()
            finally:
                self._lock.release()

    def expect_end(self) -> None:
        """Kill ranks that run longer than the grace from now on; safe in a signal handler."""
        self._signalled_s = time.monotonic()

    def stop(self) -> None:
        """Look once more, and end the thread."""
        self._is_stopped = True
        os.eventfd_write(self._wakes, 1)
        self._thread.join()
        os.close(self._wakes)

    def _run(self) -> None:
        while not self._is_stopped:
            for descriptor, _ in self._poller.poll(1000 * self._pause_s()):
                if descriptor == self._wakes:
                    os.eventfd_read(self._wakes)
            with self._lock, contextlib.suppress(OSError, psutil.Error):
                self._look()
        with self._lock:
            self._look()

    def _pause_s(self) -> float:
        attempt = self.attempt
        if attempt is None:
            return _LOOK_AGAIN_S
        age_s = time.monotonic() - attempt.began_s
        is_complete = all(rank.pid is not None for rank in attempt.ranks)
        return _LOOK_S if is_complete or age_s > 2.0 else _LOOK_FAST_S

    def _look(self) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        if any(rank.pid is None for rank in attempt.ranks):
            self._find_processes(attempt)
        at_s = time.time()  # one for all that end between two looks: their order is not known
        # Again until no other has ended: one that is looked at late may have ended because of one
        # that was looked at early.
        while ended := [rank for rank in attempt.ranks if _has_ended(rank.descriptor)]:
            for rank in ended:
                self._note_end(attempt, rank, at_s)
        self._find_boards(attempt)
        self._end_laggards(attempt)

    def _find_processes(self, attempt: Attempt) -> None:
        missing = {str(rank.logs.error): rank for rank in attempt.ranks if rank.pid is None}
        known = {rank.pid for rank in attempt.ranks}
        for pid in _children():
            if pid not in known:
                rank = missing.get(_error_file_of(pid))
                if rank is not None:
                    with contextlib.suppress(ProcessLookupError):
                        rank.descriptor = os.pidfd_open(pid)
                        rank.pid = pid
                        self._poller.register(rank.descriptor, select.POLLIN)

    def _find_boards(self, attempt: Attempt) -> None:
        """Map the boards of processes that have none yet; every 2 s look for newer ones."""
        is_due = time.monotonic() > self._looked_s + _LOOK_AGAIN_S
        for rank in attempt.ranks:
            if rank.pid is not None and not rank.has_ended and (is_due or rank.board is None):
                rank.board = Board.of_process(rank.pid) or rank.board
                with contextlib.suppress(psutil.Error):
                    rank.rss_bytes = psutil.Process(rank.pid).memory_info().rss
        if is_due:
            self._looked_s = time.monotonic()

    def _note_end(self, attempt: Attempt, rank: Rank, at_s: float) -> None:
        assert rank.descriptor is not None
        rank.at_s = at_s
        rank.code = _exit_code(rank.descriptor)
        rank.has_ended = True
        self._poller.unregister(rank.descriptor)
        os.close(rank.descriptor)
        rank.descriptor = None
        if rank.code and attempt.failed_s is None:  # not if it is unknown: others are killed then
            attempt.failed_s = time.monotonic()
            for other in attempt.ranks:
                other.reading = _last_reading(other)

    def _end_laggards(self, attempt: Attempt) -> None:
        """Kill ranks that do not end in time.

        The agent would wait for 30 s: after a failure with any torch, after a signal with 2.11,
        whose ``LaunchConfig`` has no ``shutdown_timeout``.
        """
        failed_s = math.inf if attempt.failed_s is None else attempt.failed_s
        if time.monotonic() < min(failed_s, self._signalled_s) + self._grace_s:
            return
        for rank in attempt.ranks:
            if rank.descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.descriptor, signal.SIGKILL)


def _children() -> list[int]:
    pid = os.getpid()
    try:  # of the main thread, which starts them
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # a kernel without this file
        return [child.pid for child in psutil.Process().children()]


def _error_file_of(pid: int) -> str:
    """Return the file in which a process is to record an exception: one for each rank."""
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).environ().get("TORCHELASTIC_ERROR_FILE", ""))
    return ""


def _has_ended(descriptor: int | None) -> bool:
    """Return whether a process has ended; not of one that was noted already, or not found yet."""
    if descriptor is None:
        return False
    poller = select.poll()  # its own: a poller that another thread waits in raises RuntimeError
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


def _exit_code(descriptor: int) -> int | None:
    """Return how a child ended, without reaping it; None if the agent has reaped it already."""
    try:
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _last_reading(rank: Rank) -> Page | None:
    """Read a board; if the rank has failed or ended, as of that moment."""
    if rank.board is None:
        return None
    reading = rank.board.read()
    since_s = reading.heard_s if reading.has_failed else 0.0
    if rank.at_s is not None:
        since_s = max(since_s, time.time() - rank.at_s)
    reading.now_ns -= int(since_s * 1e9)
    return reading


def _read_recorded(path: Path) -> Recorded | None:
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        text, trace = message["message"], message["extraInfo"]["py_callstack"]
        return Recorded(str(text), str(trace), path.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
