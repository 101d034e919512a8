"""``procpipe doctor``: checks what a run on this host needs, and measures the channels.

    ok       cores      2 cores, 1 package, 1 NUMA node; each process has 1 of its own
    warning  memory     0.4 GiB left of the 4.0 GiB that this control group may use, for 2 processes
                        -> free some, raise the container's limit or start fewer processes …

1  look at the host (facts.py), and judge it (checks.py)
2  start as many processes as a run would, which measure the channels between them (probe.py)
3  print all of it; the exit code is 1 if something keeps a run from working

After a time limit, all processes of step 2 are ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from procpipe.launch.console import Table, positive
from procpipe.launch.doctor.checks import Check, Status, check_channels, check_host, pairs_of
from procpipe.launch.doctor.facts import Facts, gather
from procpipe.launch.start_ranks import start_ranks
from procpipe.words import text_table

_PROBE = ("-m", "procpipe.launch.doctor.probe")
_TIMEOUT_S = 90.0

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


def main(argv: Sequence[str]) -> int:
    """Check, measure and print, by the words after ``procpipe doctor``; return the exit code."""
    options = _parser().parse_args(argv)
    console = Console()
    with _status(console, options, "looking at this host"):
        facts = gather(options.nproc)
    return _examine(facts, console, options)


def _examine(facts: Facts, console: Console, options: argparse.Namespace) -> int:
    checks = check_host(facts)
    pairs: list[dict[str, Any]] = []
    num_gpus, num_processes = len(facts.gpus), facts.num_processes
    if 0 < num_gpus < num_processes:
        found = "not tried: there are fewer GPUs than processes"
        advice = f"procpipe doctor -n {num_gpus} measures"
        checks.append(Check("start", Status.WARNING, found, advice))
    else:
        with _status(console, options, f"measuring between {num_processes} processes"):
            result = start_ranks(num_processes, _PROBE, options.timeout)
        checks += check_channels(result, num_processes)
        pairs = pairs_of(result.value or [])
    is_good = all(check.status != Status.FAILURE for check in checks)
    if options.json:
        _print_json(checks, pairs, num_processes, is_good)
    elif console.is_terminal:
        _print_rich(console, checks, pairs)
    else:
        print(plain_text(checks, pairs))
    return int(not is_good)


def _print_json(
    checks: Sequence[Check], pairs: Sequence[Mapping[str, Any]], num_processes: int, is_good: bool
) -> None:
    listed = [
        {"name": one.name, "status": one.status, "found": one.found, "advice": one.advice}
        for one in checks
    ]
    whole = {"is_good": is_good, "num_processes": num_processes, "checks": listed, "pairs": pairs}
    print(json.dumps(whole, indent=2))


def _print_rich(
    console: Console, checks: Sequence[Check], pairs: Sequence[Mapping[str, Any]]
) -> None:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        style = _STYLES[check.status]
        grid.add_row(Text(check.status, style), Text(check.name), Text(check.found))
        if check.advice:
            grid.add_row("", "", Text(f"-> {check.advice}", style))
    console.print(grid)
    if pairs:
        console.print()
        Table("one way, between neighbouring stages", _rows(pairs), 0).print(console)


def plain_text(checks: Sequence[Check], pairs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each check, the advice below it, and the table of pairs."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        texts = check.found.splitlines() + ([f"-> {check.advice}"] if check.advice else [])
        heads = [f"{check.status:8} {check.name:{width}}", *[" " * (9 + width)] * (len(texts) - 1)]
        lines += [f"{head}  {text}" for head, text in zip(heads, texts, strict=True)]
    if pairs:
        lines += ["", *text_table(_rows(pairs), 0)]
    return "\n".join(lines)


def _rows(pairs: Sequence[Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    heading = ("stages", "8 B", "64 KiB", "16 MiB down", "16 MiB up")
    return [heading] + [
        (
            f"{pair['lower']} - {pair['lower'] + 1}",
            f"{pair['small_latency_s'] * 1e6:.0f} us",
            f"{pair['middle_latency_s'] * 1e6:.0f} us",
            f"{pair['down_bytes_per_s'] / 1e9:.2f} GB/s",
            f"{pair['up_bytes_per_s'] / 1e9:.2f} GB/s",
        )
        for pair in pairs
    ]


def _status(
    console: Console, options: argparse.Namespace, activity: str
) -> contextlib.AbstractContextManager[object]:
    if options.json or not console.is_terminal:
        return contextlib.nullcontext()
    return console.status(f"{activity} …")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procpipe doctor",
        description="Check what a run on this host needs, advise, and measure the "
        "channels between neighbouring stages.",
        epilog="exit code: 1 if something keeps a run from working, else 0",
    )
    add = parser.add_argument
    add("-n", "--nproc", type=positive, metavar="N",
        help="how many processes a run has here (default: one for each GPU, else one for each "
        "core, from 2 to 4)")  # fmt: skip
    add("--json", action="store_true", help="print it as JSON")
    add("--timeout", type=float, default=_TIMEOUT_S, metavar="SECONDS",
        help="time limit of the measurement (default: %(default)g)")  # fmt: skip
    return parser
