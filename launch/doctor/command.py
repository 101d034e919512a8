"""``procpipe doctor``: checks what a run on this host needs, and measures the channels.

Judges the host (checks.py), then starts as many processes as a run would, which measure the
channels between them (probe.py). The exit code is 1 if something keeps a run from working.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from procpipe.job.pin import cores_of_host
from procpipe.launch.doctor.checks import (
    CHECKS,
    FAILURE,
    OK,
    WARNING,
    Host,
    Verdict,
    check_channels,
)
from procpipe.launch.doctor.gpus import find_gpus
from procpipe.launch.main import positive
from procpipe.launch.start_ranks import start_ranks

_PROBE = ("-m", "procpipe.launch.doctor.probe")

#: The time limit of the measurement, after which all its processes are ended.
_TIMEOUT_S = 90.0

_STYLES = {OK: "green", WARNING: "yellow", FAILURE: "bold red"}


def main(argv: Sequence[str]) -> int:
    """Check, measure and print, by the words after ``procpipe doctor``; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="procpipe doctor",
        description="Check what a run on this host needs, advise, and measure the "
        "channels between neighbouring stages.",
        epilog="exit code: 1 if something keeps a run from working, else 0",
    )
    parser.add_argument(
        "-n", "--nproc", type=positive, metavar="N",
        help="how many processes a run has here (default: one for each GPU, else one for each "
        "core, from 2 to 4)",
    )  # fmt: skip
    nproc = parser.parse_args(argv).nproc
    console = Console()
    with console.status("looking at this host, and measuring its channels …"):
        gpus, error = find_gpus()
        host = Host(nproc or len(gpus) or max(2, min(4, len(cores_of_host()))), gpus, error)
        found = {name: verdict for name, check in CHECKS.items() if (verdict := check(host))}
        result = start_ranks(host.num_processes, _PROBE, _TIMEOUT_S)
        found |= check_channels(result, host.num_processes)
    console.print(table_of(found))
    return int(any(verdict.status == FAILURE for verdict in found.values()))


def table_of(found: Mapping[str, Verdict]) -> Table:
    """Lay out a row for each check, with the advice below what was found."""
    table = Table.grid("status", "name", "found", padding=(0, 2))
    for name, verdict in found.items():
        status = Text(verdict.status, _STYLES[verdict.status])
        text = verdict.found + (f"\n-> {verdict.advice}" if verdict.advice else "")
        table.add_row(status, name, Text(text, overflow="fold"))
    return table
