"""Starts the processes of one step, and ends all of them at a time limit.

Each is in a session of its own, and all write to one log. When all have ended, some time after one
has failed, or at the limit, every process with the run's mark in its environment is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[2]

#: The variable that marks all processes of a run, including those that its processes start.
MARK = "PROCPIPE_GPU_HOUR"

#: How long other ranks may take to end once one has failed; procpipe ends them within a second.
_GRACE_S = 15.0

#: How long after the limit a process may still write its stacks and end by itself.
_LATE_S = 2.0


def run_all(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], limit_s: float, log: Path
) -> tuple[str, float]:
    """Run commands side by side, and return when all their processes have ended.

    Args:
        commands: what each rank runs.
        environment: variables to add, one of them ``MARK``.
        limit_s: when all of them are killed.
        log: the file that their output is added to.

    Returns:
        "done", "cut off", or "failed: " and how the first rank that failed ended; seconds.
    """
    start_s = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as output:
            processes.extend(_started(command, environment, output) for command in commands)
        failed = _wait(processes, start_s + limit_s + _LATE_S)
        seconds = time.monotonic() - start_s
    finally:
        _kill_all(processes, environment[MARK])
    if seconds >= limit_s:
        return "cut off", seconds
    return f"failed: {failed}" if failed else "done", seconds


def _started(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> str:
    """Wait for the end; return how the first rank that failed ended, or an empty text."""
    failed = ""
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in processes]
        if not failed and any(codes):
            rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
            failed = (
                f"rank {rank}: exit code {code}" if code > 0 else f"rank {rank}: signal {-code}"
            )
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        if None not in codes:
            break
        time.sleep(0.02)
    return failed


def _kill_all(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """Kill what is left of a step, in any session."""
    deadline_s = time.monotonic() + 5.0
    while (left := _marked(mark)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.poll()
        time.sleep(0.02)
    for process in processes:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in the driver
            process.wait(5.0)


def _marked(mark: str) -> list[int]:
    entry = f"{MARK}={mark}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in file.read_bytes().split(b"\0") and int(file.parent.name) != os.getpid():
                found.append(int(file.parent.name))
    return found
