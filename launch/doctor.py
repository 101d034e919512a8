"""``procpipe doctor``: checks what a run on this host needs, and measures the channels.

    ok       cores      2 cores, 1 package, 1 NUMA node; each process is pinned to 1
    warning  memory     0.4 GiB left of the 4.0 GiB that this control group may use, for 2 processes
                        -> free some, raise the container's limit or start fewer processes …

1  look at the host (facts.py), and judge it (checks.py)
2  start as many processes as a run would, by torchrun, which measure the channels between them
   (procpipe/run/probe.py), and judge that
3  tell all of it; the exit code is 1 if something keeps a run from working

Whatever hangs in 2 is ended after a time limit, with all its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from procpipe.launch.checks import Check, Status, check_channels, check_host
from procpipe.launch.facts import gather
from rich.console import Console
from rich.table import Table
from rich.text import Text

from procpipe.host.board import Board

__all__ = ["main", "measure"]

#: What measures, as an argument of Python.
PROBE = ("-m", "procpipe.run.probe")

_TIMEOUT_S = 90.0

#: How long torchrun may take to end its processes before they are killed.
_GRACE_S = 10.0

#: Of each rank that has written anything.
_NUM_LAST_LINES = 8

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


@dataclass(frozen=True)
class Measured:
    """How the measurement ended.

    Attributes:
        report: what the probe has told (see ``procpipe.run.probe.report``); None if it failed.
        story: why it failed.
        seconds: how long it took, processes started and ended.
    """

    report: dict[str, Any] | None
    story: str
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Check and measure, and tell.

    Args:
        argv: the words after ``procpipe doctor``.

    Returns:
        1 if something keeps a run from working, 130 after Ctrl-C, else 0.
    """
    options = _parser().parse_args(argv)
    try:
        return _examine(options)
    except KeyboardInterrupt:
        print("procpipe doctor: interrupted", file=sys.stderr)
        return 130


def _examine(options: argparse.Namespace) -> int:
    console = Console()
    with _status(console, options, "looking at this host"):
        facts = gather(options.nproc)
        checks = check_host(facts)
    num_processes = facts.num_processes
    report = None
    if 0 < len(facts.gpus) < num_processes:
        checks.append(_not_measured(len(facts.gpus)))
    else:
        with _status(console, options, f"measuring between {num_processes} processes"):
            measured = measure(num_processes, timeout_s=options.timeout)
        checks += _judge(measured, num_processes)
        report = measured.report
    is_bad = any(check.status == Status.FAILURE for check in checks)
    if options.json:
        pairs = report["pairs"] if report else []
        told = {"num_processes": num_processes, "checks": [asdict(check) for check in checks]}
        print(json.dumps({"is_good": not is_bad, **told, "pairs": pairs}, indent=2))
    elif console.is_terminal:
        _tell_terminal(console, checks, report)
    else:
        print(plain_text(checks, report))
    return int(is_bad)


def measure(
    num_processes: int, *, timeout_s: float = _TIMEOUT_S, program: Sequence[str] = PROBE
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


def plain_text(checks: Sequence[Check], report: dict[str, Any] | None) -> str:
    """Return what is told where there is no terminal: a line a check, and what to do below it."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        first, *more = check.told.splitlines()
        lines.append(f"{check.status:8} {check.name:{width}}  {first}")
        lines += [f"{'':8} {'':{width}}  {line}" for line in more]
        if check.mend:
            lines.append(f"{'':8} {'':{width}}  -> {check.mend}")
    rows = _rows(report)
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append("")
        lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join(lines)


def _not_measured(num_gpus: int) -> Check:
    told = "not tried: there are fewer GPUs than processes"
    return Check("start", Status.WARNING, told, f"procpipe doctor -n {num_gpus} measures")


def _judge(measured: Measured, num_processes: int) -> list[Check]:
    started = f"{num_processes} process{'es' if num_processes > 1 else ''}"
    if measured.report is None:
        return [
            Check(
                "start",
                Status.FAILURE,
                f"{started} could not measure the channels between them: {measured.story}",
                "mend what is found above; if that is nothing, what the processes say of it",
            )
        ]
    told = f"{started} started, connected and ended in {measured.seconds:.1f} s"
    return [Check("start", Status.OK, told), *check_channels(measured.report)]


def _rows(report: dict[str, Any] | None) -> list[tuple[str, str, str, str, str]]:
    """Return the table of pairs, its heading first."""
    rows = [("stages", "8 B", "64 KiB", "16 MiB down", "16 MiB up")]
    rows += [
        (
            f"{pair['lower']} - {pair['lower'] + 1}",
            f"{pair['small_latency_s'] * 1e6:.0f} us",
            f"{pair['middle_latency_s'] * 1e6:.0f} us",
            f"{pair['down_bytes_per_s'] / 1e9:.2f} GB/s",
            f"{pair['up_bytes_per_s'] / 1e9:.2f} GB/s",
        )
        for pair in (report["pairs"] if report else ())
    ]
    return rows


def _tell_terminal(
    console: Console, checks: Sequence[Check], report: dict[str, Any] | None
) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        style = _STYLES[check.status]
        grid.add_row(Text(check.status, style), Text(check.name), Text(check.told))
        if check.mend:
            grid.add_row("", "", Text(f"-> {check.mend}", style))
    console.print(grid)
    heading, *rows = _rows(report)
    if rows:
        table = Table(title="one way, between neighbouring stages", title_justify="left")
        for name in heading:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)


def _status(
    console: Console, options: argparse.Namespace, doing: str
) -> contextlib.AbstractContextManager[object]:
    if options.json or not console.is_terminal:
        return contextlib.nullcontext()
    return console.status(f"{doing} …")


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procpipe doctor",
        description="Check what a run on this host needs, say what to mend, and measure the "
        "channels between neighbouring stages.",
        epilog="exit code: 1 if something keeps a run from working, else 0",
    )
    parser.add_argument(
        "-n",
        "--nproc",
        type=_positive,
        metavar="N",
        help="how many processes a run has here (default: one a GPU, else one a core, but 2 to 4)",
    )
    parser.add_argument("--json", action="store_true", help="tell it as JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="when to give up measuring (default: %(default)g)",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} processes: give at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
