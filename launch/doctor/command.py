"""``procpipe doctor``: checks what a run on this host needs, and measures the channels.

    ok       cores      2 cores, 1 package, 1 NUMA node; each process has 1 of its own
    warning  memory     0.4 GiB left of the 4.0 GiB that this control group may use, for 2 processes
                        -> free some, raise the container's limit or start fewer processes …
    ok       stages 0 - 1  35 us for 8 B, 47 us for 64 KiB; 1.90 GB/s down, 1.76 GB/s up

1  look at the host (facts.py), and judge it (checks.py)
2  start as many processes as a run would, which measure the channels between them (probe.py)
3  print all of it; the exit code is 1 if something keeps a run from working

After a time limit, all processes of step 2 are ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from procpipe.launch.console import positive
from procpipe.launch.doctor.checks import Check, Status, check_channels, check_host, pairs_of
from procpipe.launch.doctor.facts import Facts, gather
from procpipe.launch.start_ranks import start_ranks
from procpipe.words import counted, text_table

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
        found = f"not tried: {num_processes} processes for {counted(num_gpus, 'GPU')}"
        advice = (
            f"start {num_gpus}, or set the GPU of each process: Stage(..., devices=['cuda:0', "
            f"'cuda:0', ...]); procpipe doctor -n {num_gpus} measures"
        )
        checks.append(Check("start", Status.WARNING, found, advice))
    else:
        with _status(console, options, f"measuring between {num_processes} processes"):
            result = start_ranks(num_processes, _PROBE, options.timeout)
        checks += check_channels(result, num_processes)
        pairs = pairs_of(result.value or [])
    is_good = all(check.status != Status.FAILURE for check in checks)
    if options.json:
        listed = [asdict(check) for check in checks]
        whole = {"is_good": is_good, "num_processes": num_processes, "checks": listed}
        print(json.dumps({**whole, "pairs": pairs}, indent=2))
    else:
        print_table(console, checks)
    return int(not is_good)


def print_table(console: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check, and the advice below it; on a terminal folded, with colours."""
    rows = []
    for check in checks:
        lines = check.found.splitlines() + ([f"-> {check.advice}"] if check.advice else [])
        rows += [(check.status, check.status, check.name, lines[0])]
        rows += [(check.status, "", "", line) for line in lines[1:]]
    grid = Grid.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for status, *texts in rows:
        grid.add_row(
            *(Text(text, _STYLES[status] if k != 1 else "") for k, text in enumerate(texts))
        )
    if console.is_terminal:
        console.print(grid)
    else:
        print("\n".join(text_table([texts for _, *texts in rows], 3)))


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
