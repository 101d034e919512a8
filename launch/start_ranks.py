"""Starts ranks that measure something, within a time limit: for ``procpipe doctor`` and ``plan``.

command ── procpipe run ── rank 0 … rank n - 1     each writes its result
   └─ waits until the time limit; then reads the results, or the report of why there are none
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Result:
    """What ranks measured."""

    value: list[Any] | None  # what each rank wrote, from JSON; None if the ranks failed
    reason: str  # why they failed
    seconds: float  # how long it took, from the start of the processes to their end


def start_ranks(num_ranks: int, program: Sequence[str], timeout_s: float) -> Result:
    """Start ranks on this host, and wait until they have ended; at ``timeout_s`` end them.

    The ``program`` is a script, or "-m" and a module, with its arguments; ``--output FILE`` is
    added. Rank 3 writes its result to FILE.3, as JSON.
    """
    start_s, ending = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="procpipe-ranks-") as folder:
        words = ["-m", "procpipe.launch", "run", "-n", str(num_ranks), "--log-dir", folder]
        words += [*program, "--output", f"{folder}/output"]
        # A file, not a pipe, which a process that is left over would hold open.
        with Path(folder, "log").open("w+") as log:
            launcher = _start(words, log)
            try:
                launcher.wait(timeout_s)
            except subprocess.TimeoutExpired:
                ending = f"no end within {timeout_s:g} s\n"
            finally:
                launcher.terminate()  # it ends all others
                code = launcher.wait()
            log.seek(0)
            reason = ending + log.read()
        value = None
        if code == 0:
            files = [Path(f"{folder}/output.{rank}") for rank in range(num_ranks)]
            value = [json.loads(file.read_text()) for file in files]
    return Result(value, reason.strip(), time.monotonic() - start_s)


def _start(words: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    """Start Python as a new process."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
