"""``procpipe doctor``: checks what a run on this host needs, and measures the channels.

    ok       cores      2 cores, 1 package, 1 NUMA node; each process has 1 of its own
    warning  memory     0.4 GiB left of the 4.0 GiB that this control group may use, for 2 processes
                        -> free some, raise the container's limit or start fewer processes …

1  look at the host (facts.py), and judge it (checks.py)
2  start as many processes as a run would, which measure the channels between them, and judge that
   (measuring.py)
3  tell all of it; the exit code is 1 if something keeps a run from working

Whatever hangs in 2 is ended after a time limit, with all its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from procpipe.launch.doctor.checks import Check, Status, check_host, warning
from procpipe.launch.doctor.facts import Facts, gather
from procpipe.launch.doctor.measuring import TIMEOUT_S, check_measured, measure

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check and measure, and tell.

    Args:
        argv: the words after ``procpipe doctor``.

    Returns:
        1 if something keeps a run from working, 130 after Ctrl-C, else 0.
    """
    options = _parser().parse_args(argv)
    console = Console()
    try:
        with _status(console, options, "looking at this host"):
            facts = gather(options.nproc)
        return _examine(facts, console, options)
    except KeyboardInterrupt:
        print("procpipe doctor: interrupted", file=sys.stderr)
        return 130


def _examine(facts: Facts, console: Console, options: argparse.Namespace) -> int:
    """Judge, measure and tell; return the exit code."""
    checks = check_host(facts)
    num_processes = facts.num_processes
    report = None
    if 0 < len(facts.gpus) < num_processes:
        checks.append(_not_measured(len(facts.gpus)))
    else:
        with _status(console, options, f"measuring between {num_processes} processes"):
            measured = measure(num_processes, timeout_s=options.timeout)
        checks += check_measured(measured, num_processes)
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
    return warning("start", told, f"procpipe doctor -n {num_gpus} measures")


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
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="when to give up measuring (default: %(default)g)",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} processes: give a number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
