"""Starts ranks that measure something, within a time limit: for ``procpipe doctor`` and ``plan``.

    command ── torchrun ── rank 0 … rank n - 1     each writes its result, and a log of its own
       └─ waits until the time limit; then reads the results, or the reason why there are none

At the time limit all processes are ended, and the reason says where each rank was.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from procpipe.job.board import Board

#: How long torchrun may take to end its processes before they are killed.
_GRACE_S = 10.0

#: Of each rank's standard error.
_NUM_LAST_LINES = 8


@dataclass(frozen=True)
class Result:
    """What ranks measured."""

    value: list[Any] | None  # what each rank wrote, from JSON; None if the ranks failed
    reason: str  # why they failed
    seconds: float  # how long it took, from the start of the processes to their end


def start_ranks(num_ranks: int, program: Sequence[str], timeout_s: float) -> Result:
    """Start ranks on this host, and wait until they have ended; at ``timeout_s`` end them.

    The ``program`` is what they run, as arguments of Python; ``--output FILE`` is added. Rank 3
    writes its result to FILE.3, as JSON.
    """
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="procpipe-ranks-") as folder:
        output, log = f"{folder}/output", Path(folder, "log")
        arguments = [
            *("-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"),
            *("--redirects=3", f"--log-dir={folder}"),
            *(*program, "--output", output),
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        # A file, not a pipe, which a process that is left over would hold open.
        with log.open("wb") as stream:
            launcher = _start(arguments, environment, stream)
            try:
                ending = f"exit code {launcher.wait(timeout_s)}"
            except subprocess.TimeoutExpired:
                ending = "\n".join([f"no end within {timeout_s:g} s", *_places(launcher)])
            finally:
                _end(launcher)
        seconds = time.monotonic() - start_s
        with contextlib.suppress(OSError, ValueError):
            if launcher.returncode == 0:
                files = [Path(f"{output}.{rank}") for rank in range(num_ranks)]
                return Result([json.loads(file.read_text()) for file in files], "", seconds)
        return Result(None, "\n".join([ending, *_last_lines(Path(folder), log)]), seconds)


def _start(
    arguments: list[str], environment: dict[str, str], log: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start Python as a new process."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
    )


def _descendants(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(launcher.pid).children(recursive=True))
    return []


def _places(launcher: subprocess.Popen[bytes]) -> list[str]:
    """Return a line for each rank that has a board: where it is."""
    boards = (Board.of_process(process.pid) for process in _descendants(launcher))
    readings = sorted((board.read() for board in boards if board), key=lambda read: read.rank)
    return [f"  rank {reading.rank}: {reading.where()}" for reading in readings]


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End torchrun and its processes, which are in sessions of their own."""
    descendants = _descendants(launcher)
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_GRACE_S)
    launcher.kill()
    launcher.wait()
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _last_lines(folder: Path, log: Path) -> list[str]:
    """Return the last lines of each rank's standard error; torchrun's own where there are none."""
    logs = {
        f"  rank {path.parent.name}: ": path
        for path in sorted(folder.glob("*/attempt_0/*/stderr.log"))
    }
    return _ends_of(logs) or _ends_of({"  ": log})


def _ends_of(logs: dict[str, Path]) -> list[str]:
    found = []
    for heading, path in logs.items():
        lines = path.read_text(errors="replace").splitlines()
        lines = [line.rstrip() for line in lines if line.strip()][-_NUM_LAST_LINES:]
        found += [f"{heading}{line}" for line in lines]
    return found
