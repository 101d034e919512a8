"""The first hour on a real GPU: tests, parity, figures, the most important first.

Within a few minutes in all, without a network: each step has processes of its own and a part of
the time (steps.py), and what it finds is kept as it finds it (results.py).

    FOLDER/results.jsonl   every finding, as it came
    FOLDER/logs.txt        all output of all processes
    FOLDER/gpu.txt         the tables; gpu.json has the findings too, gpu.md is text for docs/
    FOLDER/trace.json      a timeline for https://ui.perfetto.dev
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import signal
import sys
import time
import uuid
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from benchmarks.gpu.processes import MARK, ROOT, run_ranks
from benchmarks.gpu.results import RESULTS, append, read
from benchmarks.gpu.steps import SHORTEST_S, Facts, Step, allowance_s, steps_for

__all__ = ["main"]

#: What is left at the end for the tables, and for processes that are slow to end.
_RESERVE_S = 8.0

#: The most for the first step, on which the others depend.
_FIRST_S = 40.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps.

    Returns:
        0; 1 if a step failed or was cut off; 2 if nothing can be run; 130 or 143 if interrupted.
    """
    options = _parser().parse_args(argv)
    folder: Path = options.folder.resolve()
    if options.only_tables:
        return _report(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("results.jsonl", "logs.txt", "trace.json"):
        folder.joinpath(old).unlink(missing_ok=True)
    try:
        run = _Run(options, folder)
    except ValueError as error:
        print(f"gpu-hour: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    code = 0
    try:
        run.all_steps()
    except _Interrupted as interrupt:
        code = 128 + interrupt.number
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the tables take no time
    return max(code, _report(folder))


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _: FrameType | None) -> None:
    raise _Interrupted(number)


class _Run:
    """One run of the command.

    Args:
        options: its command line.
        folder: where its files are.

    Raises:
        ValueError: something is missing that all steps need.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._end_s = time.monotonic() + options.budget_s - _RESERVE_S
        self._only: list[str] | None = options.steps
        self._log, self._results = folder / "logs.txt", folder / "results.jsonl"
        self._is_emulated = hasattr(ctypes.CDLL(None), "emulated_gpu_synchronizations")
        self._is_tiny = options.tiny or self._is_emulated
        paths = [str(ROOT)]
        if options.wheels:
            paths.insert(0, str(_unpacked(options.wheels, folder / "site")))
            sys.path.insert(0, paths[0])
        if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            raise ValueError(
                f"{', '.join(missing)} cannot be imported by {sys.executable}: install, or put "
                "wheels for this Python into a folder and add --wheels FOLDER"
            )
        self._has_pytest = importlib.util.find_spec("pytest") is not None
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        self._environment = {
            MARK: uuid.uuid4().hex,
            RESULTS: str(self._results),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._with_nccl = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        if options.nccl and not self._is_emulated:  # which has an NCCL of its own
            self._with_nccl |= _preloading(_nccl_library(options.nccl))
        self._is_nccl_given = bool(options.nccl)
        append(self._results, {"kind": "run", "emulated": self._is_emulated, "tiny": self._is_tiny})

    def all_steps(self) -> None:
        """Run the steps in their order, as far as the time goes."""
        self._run(steps_for(Facts(1))[0], _FIRST_S)
        steps = [step for step in steps_for(self._facts())[1:] if self._is_wanted(step)]
        for step in steps:
            if step.why_not:
                self._end(step, f"not run: {step.why_not}")
        to_run = [step for step in steps if not step.why_not]
        for k, step in enumerate(to_run):
            left_s = self._end_s - time.monotonic()
            self._run(step, allowance_s(left_s, [later.weight for later in to_run[k:]]))

    def _facts(self) -> Facts:
        """Look at what the first step has found; one GPU is assumed where it has failed."""
        found = next((r for r in read(self._results) if r.get("kind") == "versions"), {})
        why_no_tests = ""
        if not self._has_pytest:
            why_no_tests = "pytest cannot be imported: carry its wheels, and add --wheels FOLDER"
        elif not _test_files():
            why_no_tests = "the folder tests/ is not here"
        return Facts(
            found.get("num_gpus", 1),
            self._is_tiny,
            why_no_tests,
            self._is_nccl_given or found.get("nccl", [0]) >= [2, 30],
        )

    def _is_wanted(self, step: Step) -> bool:
        return self._only is None or step.name in self._only

    def _run(self, step: Step, limit_s: float) -> None:
        if limit_s < SHORTEST_S:
            self._end(step, f"not run: {max(0.0, limit_s):.0f} s were left for it")
            return
        print(f"{step.name}: {step.title} (at most {limit_s:.0f} s) …", flush=True)
        begin = {"kind": "begin", "name": step.name, "title": step.title, "limit_s": limit_s}
        append(self._results, begin)
        with self._log.open("a") as log:
            log.write(f"\n==== {step.name}: {step.title}\n")
        environment = self._environment | (self._with_nccl if step.with_nccl else {})
        ended = run_ranks(
            self._command(step, limit_s),
            step.num_ranks,
            environment,
            limit_s,
            self._log,
            is_launched=bool(step.function),
        )
        self._end(step, ended.outcome, ended.seconds)

    def _command(self, step: Step, limit_s: float) -> list[str]:
        if not step.function:
            return [sys.executable, "-m", "pytest", *_PYTEST, *_test_files()]
        end = time.time() + limit_s
        words = [step.function, step.name, json.dumps(step.options), str(end)]
        return [sys.executable, "-m", "benchmarks.gpu.child", *words]

    def _end(self, step: Step, outcome: str, seconds: float | None = None) -> None:
        print(f"{step.name}: {outcome}", flush=True)
        record = {"kind": "end", "name": step.name, "outcome": outcome, "seconds": seconds}
        append(self._results, record)


#: What procpipe imports beside the standard library, and torch.distributed to gather objects.
_NEEDED = ("torch", "psutil", "numpy")

#: Without the time limits of a plugin that may not be there: the step has its own.
_PYTEST = (
    *("-p", "benchmarks.gpu.plugin", "--gpus", "-q", "-s", "--tb=short", "-p", "no:cacheprovider"),
    *("-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"),
)


def _test_files() -> list[str]:
    """List the files with tests for GPUs, so that the others need not be imported."""
    files = sorted(ROOT.joinpath("tests").rglob("test_*.py"))
    marks = re.compile(r"mark\.(on_gpus|gpu)\b")
    return [str(file.relative_to(ROOT)) for file in files if marks.search(file.read_text())]


def _unpacked(wheels: Path, site: Path) -> Path:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def _nccl_library(path: Path) -> Path:
    """Find the library: the path itself, or in a folder."""
    found = [path] if path.is_file() else sorted(path.rglob("libnccl.so*"))
    if not found:
        raise ValueError(f"--nccl {path}: there is no libnccl.so.2")
    return found[0].resolve()


def _preloading(library: Path) -> dict[str, str]:
    """Put a library before the one that torch brings."""
    before = {"LD_PRELOAD": library, "LD_LIBRARY_PATH": library.parent}
    return {
        name: ":".join(filter(None, [str(value), os.environ.get(name)]))
        for name, value in before.items()
    }


def _report(folder: Path) -> int:
    """Print and write all that has been found; return 1 if a step has not ended well."""
    from benchmarks.gpu.tables import markdown, tables_of

    records = read(folder / "results.jsonl")
    tables = tables_of(records)
    text = "\n\n\n".join(table.to_text() for table in tables) + "\n"
    print(f"\n{text}", flush=True)
    folder.joinpath("gpu.txt").write_text(text)
    folder.joinpath("gpu.md").write_text(markdown(records))
    written = {"records": records, "tables": [asdict(table) for table in tables]}
    folder.joinpath("gpu.json").write_text(json.dumps(written, indent=1) + "\n")
    print(f"(also in {folder}: gpu.txt, gpu.md, gpu.json, results.jsonl, logs.txt)", flush=True)
    begun = {record["name"] for record in records if record.get("kind") == "begin"}
    well = {r["name"] for r in records if r.get("kind") == "end" and r["outcome"] == "done"}
    return 1 if begun - well else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--folder", type=Path, default=Path("build/gpu-hour"), help="for results")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all steps")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 from 2.30 on, or its folder")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that are missing here")
    parser.add_argument("--tiny", action="store_true", help="sizes for an emulated GPU")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="only these, after versions")
    parser.add_argument(
        "--only-tables", action="store_true", help="of what FOLDER has; run nothing"
    )
    return parser
