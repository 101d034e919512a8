"""Kills every process of a run, also after the launcher itself was killed.

    launcher ──── pipe ────> warden        a process of its own, in a session of its own
       │                        │
       ├── rank 0 ── worker     │ the pipe ends: the launcher has ended, for whatever cause
       └── rank 1 ── worker     └──> kill what is left of the run, until nothing is left

The processes of a run have its token in their environment, PROCPIPE_RUN: ranks, a data loader's
workers, a user's subprocesses, daemons in sessions of their own. A process with another environment
is found as a descendant of one that has the token, or as a member of its session.

The warden runs this file alone (``python -I -S /dev/fd/N TOKEN``) and uses the standard library
only: it starts in 20 ms, and no package of the user can break it. Its command line does not name
procpipe: ``pkill -9 -f procpipe`` kills the launcher, but not the warden.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

#: The environment variable; a run that is started by a run's process adds its token to it.
TOKEN = "PROCPIPE_RUN"

#: What the launcher writes when it ends normally.
_REGULAR_END = b"."

#: How long the kernel may take to end killed processes.
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.02

_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Process:
    """A process of this host, as the kernel lists it."""

    pid: int
    name: str
    parent: int
    session: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


def end_family(
    token: str, grace_s: float = 0.0, ancestor: int | None = None, spared: Collection[int] = ()
) -> list[Process]:
    """End all processes of a run; return those that were alive.

    They get SIGTERM and ``grace_s`` to end, then SIGKILL. For the other arguments see ``family``.
    """
    found: dict[int, Process] = {}
    for signum, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_TIMEOUT_S)):
        deadline_s = time.monotonic() + limit_s
        num_quiet = 0
        # Twice, as a process shows no environment for a moment while it calls exec().
        while num_quiet < 2 and time.monotonic() < deadline_s:
            entries = family(token, ancestor, spared)
            for entry in entries:
                if signum == signal.SIGKILL or entry.pid not in found:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(entry.pid, signum)
                found.setdefault(entry.pid, entry)
            num_quiet = 0 if entries else num_quiet + 1
            time.sleep(_POLL_S if entries else 0.001)
    return list(found.values())


def family(token: str, ancestor: int | None = None, spared: Collection[int] = ()) -> list[Process]:
    """Return the living processes of a run.

    Args:
        token: in the environment of the run's processes.
        ancestor: a process whose descendants belong to the run, too.
        spared: processes that do not belong to it.
    """
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    entries = {entry.pid: entry for entry in map(_entry, pids) if entry is not None}
    carriers = {pid for pid in entries if _carries(pid, token)}
    # A rank leads a session of its own, and has started all others in it. A process of the run may
    # be in the session of the user's shell, which does not belong to the run.
    sessions = {entries[pid].session for pid in carriers} - {0, os.getsid(0)}
    sessions -= entries.keys() - carriers
    found = carriers | {pid for pid, entry in entries.items() if entry.session in sessions}
    if ancestor is not None:
        found.add(ancestor)
    while more := {p for p, e in entries.items() if e.parent in found} - found:
        found |= more
    found -= {os.getpid(), ancestor, *spared}
    return [entry for pid, entry in entries.items() if pid in found]


def _entry(pid: int) -> Process | None:
    """Read a process from /proc; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return None
    state, parent, _, session, *_ = rest.split()
    if state in "ZX":
        return None
    return Process(pid, head.partition("(")[2], int(parent), int(session))


def _carries(pid: int, token: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # another user's, or it has ended
        return False
    name = f"{TOKEN}=".encode()
    return any(v.startswith(name) and token.encode() in v for v in variables)


class Warden:
    """Starts the warden process in the launcher, and stops it after a normal end of the run."""

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
        self.pid = self._process.pid

    def dismiss(self) -> None:
        """Stop it; before it ends, it kills what is left of the run."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(_REGULAR_END)
            self._process.stdin.close()
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it was stopped by a signal
            self._process.kill()
            self._process.wait()


def _main(token: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    received = b""
    while data := os.read(0, 64):
        received += data
    end_family(token)
    if received != _REGULAR_END:
        cursor = _SHOW_CURSOR if os.isatty(2) else ""  # the live table had hidden it
        text = f"{cursor}\nprocpipe: the launcher was killed; all its processes are killed, too\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


if __name__ == "__main__":
    _main(sys.argv[1])
