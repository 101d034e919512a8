"""``python -m benchmarks PART …``; ``python -m benchmarks all`` is what ``make bench`` runs."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from benchmarks.report import publish

#: Parts by name; those of "all" take a few minutes together.
QUICK = [
    "host_cost",
    "throughput",
    "checkpoint",
    "overlap",
    "memory",
    "start",
    "growth",
    "boundary",
    "scaling",
]
LONG: list[str] = []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    modules = {part: importlib.import_module(f"benchmarks.{part}") for part in (*QUICK, *LONG)}
    for part, module in modules.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.configure(_with_out(parts.add_parser(part, help=summary, description=summary)))
    _with_out(parts.add_parser("all", help=f"these, as they are: {', '.join(QUICK)}"))
    options = parser.parse_args(argv)
    chosen = QUICK if options.part == "all" else [options.part]
    start_s = time.monotonic()
    for part in chosen:
        of_part = options if options.part != "all" else parser.parse_args([part])
        publish(modules[part].run(of_part), options.out)
    print(f"({time.monotonic() - start_s:.0f} s)")
    return 0


def _with_out(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--out", type=Path, default=Path("build/benchmarks"), help="folder for the results"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
