"""``python -m benchmarks PART …``; ``python -m benchmarks all`` is what ``make bench`` runs.

``python -m benchmarks page`` writes the first tables of docs/benchmarks.md from these results;
``python -m benchmarks gpu`` is what ``make gpu-hour`` runs on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from pathlib import Path
from types import ModuleType

from benchmarks.gpu import hour

#: Parts by name, the most important first: they are to take 15 minutes together.
QUICK = [
    "throughput",
    "sharded",
    "hf",
    "memory",
    "start",
    "boundary",
    "predictions",
]

#: Parts that are not among those.
MORE = ["any_module", "published", "gpu_checks"]

_MODULES = {"gpu_checks": "benchmarks.gpu.checks"}

#: Where the results are, if nothing else is said.
OUT = Path("build/benchmarks")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["gpu"]:  # needs fewer packages
        return hour.main(words[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    names = [*QUICK, *MORE]
    is_one = bool(words) and words[0] in names  # the others need not be imported
    modules = {part: _imported(part) for part in (words[:1] if is_one else names)}
    for part, module in modules.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.configure(_with_common(parts.add_parser(part, help=summary, description=summary)))
    every = parts.add_parser("all", help=f"with their default options: {', '.join(QUICK)}")
    _with_common(every).add_argument(
        "--budget-s", type=float, default=900.0, help="no part begins after so many seconds"
    )
    page = parts.add_parser("page", help="write the tables of docs/benchmarks.md from results")
    page.add_argument("folders", type=Path, nargs="*", default=[OUT], help=f"by default {OUT}")
    options = parser.parse_args(words)
    if options.part == "page":
        from benchmarks.page import PAGE, write

        write(PAGE, options.folders)
        return 0
    if options.part != "all":
        return _run({options.part: options}, modules, math.inf)
    common = ["--out", str(options.out), "--device", options.device]
    common += ["--sizes", options.sizes] if options.sizes else []
    all_parts = {part: parser.parse_args([part, *common]) for part in QUICK}
    return _run(all_parts, modules, options.budget_s)


def _run(
    parts: dict[str, argparse.Namespace], modules: dict[str, ModuleType], budget_s: float
) -> int:
    """Run parts; return 1 if one has failed, or there was no time for it."""
    from benchmarks.quiet import Watch, drift
    from benchmarks.report import publish

    failed = []
    start_s = time.monotonic()
    for part, options in parts.items():
        if options.device not in getattr(modules[part], "DEVICES", ("cpu",)):
            print(f"{part}: not run: it is for CPUs", flush=True)
            continue
        if time.monotonic() - start_s > budget_s:
            print(f"{part}: not run: {budget_s:.0f} s are over", file=sys.stderr)
            failed.append(part)
            continue
        options.sizes = options.sizes or ("small" if options.device == "cpu" else "full")
        watch, part_start_s = Watch(), time.monotonic()
        try:
            report = modules[part].run(options)
        except RuntimeError as error:  # the other parts still run
            print(f"{part}: {error}", file=sys.stderr)
            failed.append(part)
            continue
        quiet = {**watch.shares(), "drift": drift(report.one_process)}
        publish(report, options.out, quiet)
        print(f"({part}: {time.monotonic() - part_start_s:.0f} s)", flush=True)
    print(f"({time.monotonic() - start_s:.0f} s)")
    if failed:
        print(f"failed or not run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _imported(part: str) -> ModuleType:
    return importlib.import_module(_MODULES.get(part, f"benchmarks.{part}"))


def _with_common(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add = parser.add_argument
    add("--out", type=Path, default=OUT, help="folder for the results")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--sizes",
        choices=("small", "full", "tiny"),
        help="by default small on CPUs and full on GPUs; tiny only shows that it runs",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
