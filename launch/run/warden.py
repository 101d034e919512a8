"""Ends every process of a run, also after the launcher itself was killed.

    launcher ──── pipe ────> warden        a process of its own, in a session of its own
       │                        │
       ├── rank 0 ── worker     │ the pipe ends: the launcher is gone, by whatever cause
       └── rank 1 ── worker     └──> kill all that is left of the run, again until nothing is

A run's processes carry its token in their environment, PROCPIPE_RUN, wherever they have moved: a
data loader's workers, a user's subprocesses, daemons in sessions of their own. Who was started with
another environment is found as a descendant of one that carries it, or as a member of its session.

The warden runs this file by itself (``python -I -S /dev/fd/N TOKEN``): standard library only, so
that it starts in 20 ms and no package of the user's can keep it from its work. Its command line
does not name procpipe: ``pkill -9 -f procpipe`` ends the launcher, not who sees to its ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

#: The environment variable; a run that is started by a run's process adds its token to it.
TOKEN = "PROCPIPE_RUN"

#: What the launcher writes when it has seen to everything itself.
_ALL_IS_WELL = b"."

#: How long the kernel may take to end killed processes.
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.02

_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Leftover:
    """A process of a run that had to be ended."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


@dataclass(frozen=True)
class _Entry:
    pid: int
    name: str
    parent: int
    session: int


def family(token: str, ancestor: int | None = None, spared: Collection[int] = ()) -> set[int]:
    """Return the living processes of a run.

    Args:
        token: in the environment of the run's processes.
        ancestor: all its descendants belong to the run too.
        spared: processes that do not belong to it.
    """
    return {entry.pid for entry in _family(token, ancestor, spared)}


def end_family(
    token: str, grace_s: float = 0.0, ancestor: int | None = None, spared: Collection[int] = ()
) -> list[Leftover]:
    """End all processes of a run; return those that were alive.

    Args:
        token: as for ``family``.
        grace_s: how long they may take to end by SIGTERM, before SIGKILL.
        ancestor: as for ``family``.
        spared: as for ``family``.
    """
    found: dict[int, Leftover] = {}

    def send(signum: signal.Signals, *, to_all: bool) -> bool:
        """Signal all (or those not seen before); say whether there were any."""
        entries = _family(token, ancestor, spared)
        for entry in entries:
            if to_all or entry.pid not in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(entry.pid, signum)
            found.setdefault(entry.pid, Leftover(entry.pid, entry.name))
        return bool(entries)

    if grace_s > 0:
        _repeat(lambda: send(signal.SIGTERM, to_all=False), grace_s)
    _repeat(lambda: send(signal.SIGKILL, to_all=True), _KILL_TIMEOUT_S)
    return list(found.values())


def _repeat(is_needed: Callable[[], bool], timeout_s: float) -> None:
    """Call a function until it says twice in a row that there is nothing left, or time is up."""
    deadline_s = time.monotonic() + timeout_s
    num_quiet = 0
    # Twice: a process that is just being replaced (exec) shows no environment for a moment.
    while num_quiet < 2 and time.monotonic() < deadline_s:
        num_quiet = 0 if is_needed() else num_quiet + 1
        time.sleep(_POLL_S if num_quiet == 0 else 0.001)


def _family(token: str, ancestor: int | None, spared: Collection[int]) -> list[_Entry]:
    entries = {entry.pid: entry for entry in map(_entry, _pids()) if entry is not None}
    ours = os.getpid()
    carriers = {pid for pid in entries if _carries(pid, token)}
    # A rank leads a session of its own; whoever is in it was started by the rank. Never the
    # session of the user's shell, should a process of the run be in that.
    sessions = {entries[pid].session for pid in carriers} - {0, os.getsid(0)}
    sessions -= entries.keys() - carriers
    wanted = carriers | {pid for pid, entry in entries.items() if entry.session in sessions}
    roots = wanted if ancestor is None else wanted | {ancestor}
    while more := {p for p, e in entries.items() if e.parent in roots and p not in roots}:
        roots |= more
    keep = {ours, ancestor, *spared}
    return [entry for pid, entry in entries.items() if pid in roots and pid not in keep]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _entry(pid: int) -> _Entry | None:
    """Read what the kernel says of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return None
    state, parent, _, session, *_ = rest.split()
    if state in "ZX":
        return None
    return _Entry(pid, head.partition("(")[2], int(parent), int(session))


def _carries(pid: int, token: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # another user's, or it has ended
        return False
    name = f"{TOKEN}=".encode()
    return any(v.startswith(name) and token.encode() in v for v in variables)


class Warden:
    """The launcher's end: starts the warden process, and tells it when there is no more to do.

    Args:
        token: the run's.
    """

    def __init__(self, token: str) -> None:
        with open(__file__, "rb") as file:
            number = file.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", f"/dev/fd/{number}", token],
                stdin=subprocess.PIPE,
                pass_fds=[number],
                start_new_session=True,
                cwd="/",
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def dismiss(self) -> None:
        """Let it end, once it has seen for itself that nothing is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(_ALL_IS_WELL)
            self._process.stdin.close()
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()


def _main(token: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    last_words = b""
    while data := os.read(0, 64):
        last_words += data
    end_family(token)
    if last_words != _ALL_IS_WELL:
        cursor = _SHOW_CURSOR if os.isatty(2) else ""  # the live table had hidden it
        told = f"{cursor}\nprocpipe: the launcher was killed, and so is all that it had started\n"
        with contextlib.suppress(OSError):
            os.write(2, told.encode())


if __name__ == "__main__":
    _main(sys.argv[1])
