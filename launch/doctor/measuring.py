"""What ``procpipe doctor`` measures: it starts processes that do (see launch/doctor/probe.py).

    doctor ── torchrun ── rank 0 … rank n - 1     each with its own log
      └─ waits, for so long at most; then the report, or the story of why there is none

Whatever hangs is ended, with all its processes, and is told with where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from procpipe.job.board import Board
from procpipe.launch.doctor.checks import Check, failure, ok, warning

#: What measures, as an argument of Python.
PROBE = ("-m", "procpipe.launch.doctor.probe")

TIMEOUT_S = 90.0

#: How long torchrun may take to end its processes before they are killed.
_GRACE_S = 10.0

#: Of each rank that has written anything.
_NUM_LAST_LINES = 8

#: What a host does that is not overloaded: 0.03 ms and 1 GB/s on a 2-core virtual machine.
_SLOW_LATENCY_S = 1e-3
_SLOW_CPU_BYTES_PER_S = 0.25e9
_SLOW_GPU_BYTES_PER_S = 5e9

#: A pair that has so much less than the best one stands out.
_OUTLIER = 0.4


@dataclass(frozen=True)
class Measured:
    """How the measurement ended.

    Attributes:
        report: what the probe has told (see ``launch.doctor.probe.report``); None if it failed.
        story: why it failed.
        seconds: how long it took, processes started and ended.
    """

    report: dict[str, Any] | None
    story: str
    seconds: float


def measure(
    num_processes: int, *, timeout_s: float = TIMEOUT_S, program: Sequence[str] = PROBE
) -> Measured:
    """Start processes that measure the channels between them, and wait for what they find.

    Args:
        num_processes: how many.
        timeout_s: when all of them are ended.
        program: what they run, as arguments of Python; ``--output FILE`` is added.
    """
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="procpipe-doctor-") as folder:
        output, log = Path(folder, "report.json"), Path(folder, "log")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", f"--nproc-per-node={num_processes}"),
            *("--redirects=3", f"--log-dir={folder}"),
            *(*program, "--output", str(output)),
        ]
        # A file, not a pipe, which a process that is left over would hold open.
        with log.open("wb") as stream:
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
            try:
                ended = f"exit code {launcher.wait(timeout_s)}"
            except subprocess.TimeoutExpired:
                ended = "\n".join([f"no end within {timeout_s:g} s", *_whereabouts(launcher)])
            finally:
                _end(launcher)
        seconds = time.monotonic() - start_s
        with contextlib.suppress(OSError, ValueError):
            if launcher.returncode == 0:
                return Measured(json.loads(output.read_text()), "", seconds)
        return Measured(None, "\n".join([ended, *_last_words(Path(folder), log)]), seconds)


def check_measured(measured: Measured, num_processes: int) -> list[Check]:
    """Judge how the measurement ended, and what it found."""
    started = f"{num_processes} process{'es' if num_processes > 1 else ''}"
    if measured.report is None:
        told = f"{started} could not measure the channels between them: {measured.story}"
        mend = "mend what is found above; if that is nothing, what the processes say of it"
        return [failure("start", told, mend)]
    told = f"{started} started, connected and ended in {measured.seconds:.1f} s"
    return [ok("start", told), *_check_channels(measured.report)]


def _check_channels(report: Mapping[str, Any]) -> list[Check]:
    pairs: Sequence[Mapping[str, Any]] = report["pairs"]
    if not pairs:
        return [ok("channels", "one process has no neighbours: there is nothing to measure")]
    least = min(map(_least, pairs)) / 1e9
    is_cpu = all(rank["device"] == "cpu" for rank in report["ranks"])
    return [*_check_latency(pairs), *_check_bandwidth(pairs, is_cpu=is_cpu)] or [
        ok("channels", f"{least:.2f} GB/s and more between neighbouring stages")
    ]


def _check_latency(pairs: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    slowest = max(pairs, key=lambda pair: float(pair["small_latency_s"]))
    latency_s = slowest["small_latency_s"]
    if latency_s > _SLOW_LATENCY_S:
        yield warning(
            "latency",
            f"a message of 8 bytes takes {latency_s * 1e3:.1f} ms between {_stages(slowest)}",
            "see what else runs on this host (top), and give each process a core of its own",
        )


def _check_bandwidth(pairs: Sequence[Mapping[str, Any]], *, is_cpu: bool) -> Iterator[Check]:
    narrowest = min(pairs, key=_least)
    least, most = _least(narrowest), max(map(_least, pairs))
    usual = _SLOW_CPU_BYTES_PER_S if is_cpu else _SLOW_GPU_BYTES_PER_S
    told = f"{least / 1e9:.2f} GB/s between {_stages(narrowest)}"
    if least < usual:
        yield warning(
            "bandwidth",
            f"{told}, where {usual / 1e9:.2f} GB/s and much more is usual",
            "see what else runs on this host (top), and whether its CPU time is limited"
            if is_cpu
            else "run once with NCCL_DEBUG=INFO: 'via SHM' or 'via NET' means that these GPUs "
            "cannot reach one another directly",
        )
    elif least < _OUTLIER * most:
        yield warning(
            "bandwidth",
            f"{told}, {most / 1e9:.2f} GB/s between others",
            "choose the order of devices so that neighbours are close (nvidia-smi topo -m), or a "
            "balance that cuts where activations are small",
        )


def _stages(pair: Mapping[str, Any]) -> str:
    return f"stages {pair['lower']} and {pair['lower'] + 1}"


def _least(pair: Mapping[str, Any]) -> float:
    return float(min(pair["down_bytes_per_s"], pair["up_bytes_per_s"]))


def _family(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(launcher.pid).children(recursive=True))
    return []


def _whereabouts(launcher: subprocess.Popen[bytes]) -> list[str]:
    """Return where each rank is, a line each, for those that have come so far as to tell."""
    boards = (Board.of_process(process.pid) for process in _family(launcher))
    readings = sorted((board.read() for board in boards if board), key=lambda told: told.rank)
    return [f"  rank {reading.rank}: {reading.where()}" for reading in readings]


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End torchrun and its processes, which are in sessions of their own."""
    family = _family(launcher)
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_GRACE_S)
    launcher.kill()
    launcher.wait()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _last_words(folder: Path, launchers_log: Path) -> list[str]:
    """Return the last lines that each rank has written; torchrun's own where there are none."""
    words: list[str] = []
    for path in sorted(folder.glob("*/attempt_0/*/stderr.log")):
        lines = _last_lines(path)
        words += [f"  rank {path.parent.name}: {line}" for line in lines]
    return words or [f"  {line}" for line in _last_lines(launchers_log)]


def _last_lines(path: Path) -> list[str]:
    lines = path.read_text(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-_NUM_LAST_LINES:]
