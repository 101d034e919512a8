"""Starts the processes of one step, as torchrun would, and ends all of them at a time limit.

run ── rank 0 … rank n - 1          each in a session of its own, with its output in a file
 └─ waits until all have ended, one has failed a while ago, or the limit has passed;
    then kills every process that carries the run's mark in its environment
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MARK", "ROOT", "Ended", "run_ranks"]

ROOT = Path(__file__).parents[2]

#: The variable that marks all processes of a run, those too that a step's processes start.
MARK = "PROCPIPE_GPU_HOUR"

#: How long other ranks may take to end once one has failed; procpipe ends them within a second.
_GRACE_S = 15.0

#: How long after the limit a process may still write its stacks and end by itself.
_LATE_S = 2.0

#: How the last line of a traceback begins, or procpipe's one line of a rank that was ended.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b|procpipe: rank")

_VICTIM = ", because rank"

_LEFT_OUT = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Ended:
    """How a step's processes ended.

    Attributes:
        outcome: "done", "cut off", or "failed: " and why.
        seconds: how long they took.
    """

    outcome: str
    seconds: float


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    environment: Mapping[str, str],
    limit_s: float,
    log: Path,
    *,
    is_launched: bool = True,
) -> Ended:
    """Run a command on so many ranks, and return when all their processes have ended.

    Args:
        command: what each rank runs.
        num_ranks: how many there are.
        environment: variables to add; those have ``MARK``.
        limit_s: when all of them are killed.
        log: where their output is added to.
        is_launched: whether they get the variables of a launcher.
    """
    parts = [log.with_name(f"{log.name}.{rank}") for rank in range(num_ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    start_s = time.monotonic()
    try:
        launch = _launch_variables(num_ranks) if is_launched else {}
        for rank, part in enumerate(parts):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if is_launched else {}
            with part.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=_inherited() | dict(environment) | launch | own,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        first_failed = _wait(processes, start_s + limit_s + _LATE_S)
        seconds = time.monotonic() - start_s
    finally:
        _kill_all(processes, environment[MARK])
        _join(log, parts, processes)
    is_late = seconds >= limit_s
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if not failed and not is_late:
        return Ended("done", seconds)
    failed = failed if first_failed is None else [first_failed, *failed]
    errors = {rank: _last_error(log, rank, processes[rank], is_late) for rank in failed}
    # One that ended because of another one says so, and is not where it began.
    began = [f": rank {r}: {line}" for r, line in errors.items() if line and _VICTIM not in line]
    others = [f": rank {r}: {line}" for r, line in errors.items() if line]
    reason = [*began, *others, ""][0]
    return Ended(f"{'cut off' if is_late else 'failed'}{reason}", seconds)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> int | None:
    """Wait for the end; return the rank that failed first, or None."""
    first_failed = None
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        time.sleep(0.02)
        if first_failed is None:
            first_failed = _failed(processes)
            if first_failed is not None:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return _failed(processes) if first_failed is None else first_failed


def _failed(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    return next((rank for rank, process in enumerate(processes) if process.poll()), None)


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}


def _launch_variables(num_ranks: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _kill_all(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """Kill what is left of a step, in whatever session it is."""
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
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in folder.joinpath("environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _join(log: Path, parts: Sequence[Path], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Put the output of all ranks into one file, so that a folder has few."""
    with log.open("ab") as joined:
        for rank, (part, process) in enumerate(zip(parts, processes, strict=False)):
            head = f"---- rank {rank}, exit code {process.returncode}\n"
            joined.write(head.encode() + part.read_bytes())
            part.unlink()


def _last_error(log: Path, rank: int, process: subprocess.Popen[bytes], is_late: bool) -> str:
    """Return the last error that a rank wrote in the newest step, or how else it ended."""
    text = log.read_text(errors="replace").rpartition(f"---- rank {rank}, ")[2]
    written = text.partition("\n---- rank ")[0].splitlines()[1:]
    lines = [line.removeprefix(f"[rank{rank}]: ").strip() for line in written]
    errors = [line for line in lines if _ERROR.match(line)]
    if is_late or errors:
        return errors[-1][:300] if errors else ""
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}"
    return next((line[:300] for line in reversed(lines) if line), "no output")
