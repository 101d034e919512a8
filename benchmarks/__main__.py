"""``python -m benchmarks PART …``; ``python -m benchmarks all`` is what ``make bench`` runs.

``python -m benchmarks published`` runs the published experiments, scaled to two cores;
``python -m benchmarks gpu`` is what ``make gpu-hour`` runs on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from benchmarks.gpu import hour

#: Parts by name, which take 20 minutes together.
QUICK = [
    "host_cost",
    "throughput",
    "schedules",
    "checkpoint",
    "overlap",
    "replicas",
    "sharded",
    "ties",
    "hf",
    "memory",
    "start",
    "growth",
    "boundary",
    "predictions",
    "scaling",
    "weights",
]

#: The published experiments, in a package of their own; together they take about 10 minutes.
PUBLISHED = [
    "unet_speed",
    "unet_memory",
    "amoebanet_speed",
    "amoebanet_memory",
    "resnet_speed",
    "resnet_accuracy",
    "ablation",
]

#: Several parts under one name.
GROUPS = {"all": QUICK, "published": PUBLISHED}


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["gpu"]:  # needs fewer packages, and writes results as it runs
        return hour.main(words[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    modules = {part: importlib.import_module(f"benchmarks.{part}") for part in QUICK}
    modules |= {part: importlib.import_module(f"benchmarks.published.{part}") for part in PUBLISHED}
    for part, module in modules.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.configure(_with_out(parts.add_parser(part, help=summary, description=summary)))
    for group, members in GROUPS.items():
        _with_out(parts.add_parser(group, help=f"with their default options: {', '.join(members)}"))
    options = parser.parse_args(words)
    from benchmarks.report import publish

    failed = []
    start_s = time.monotonic()
    for part in GROUPS.get(options.part, [options.part]):
        part_options = options
        if part != options.part:
            part_options = parser.parse_args([part, "--out", str(options.out)])
        try:
            publish(modules[part].run(part_options), options.out)
        except RuntimeError as error:  # the other parts still run
            print(f"{part}: {error}", file=sys.stderr)
            failed.append(part)
    print(f"({time.monotonic() - start_s:.0f} s)")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _with_out(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--out", type=Path, default=Path("build/benchmarks"), help="folder for the results"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
