"""The first hour on a real GPU: tests, parity, figures, the most important first.

It takes a few minutes and needs no network: each step has processes of its own and a part of the
time (steps.py), and each finding is written at once (results.py).

    FOLDER/results.jsonl   every finding, as it came
    FOLDER/logs.txt        all output of all processes
    FOLDER/gpu.txt         the tables; gpu.json has the findings too, gpu.md is text for docs/
    FOLDER/trace.*.json    a timeline of each rank for https://ui.perfetto.dev
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.processes import MARK, ROOT, run_all
from benchmarks.gpu.results import RESULTS, append, read
from benchmarks.gpu.steps import SHORTEST_S, Step, allowance_s, steps_for

#: Kept at the end for the tables, and for processes that are slow to end.
_RESERVE_S = 8.0

#: The most for the first step, on which the others depend.
_FIRST_S = 40.0

#: What procpipe imports beside the standard library, and torch.distributed to gather objects.
_NEEDED = ("torch", "psutil", "numpy")

_INSTALL = "carry its wheel, install it by pip install --target FOLDER, and set PYTHONPATH=FOLDER"

#: Without the time limits of a plugin that may not be there: the step has its own.
_PYTEST = (
    *("-p", "benchmarks.gpu.plugin", "--gpus", "-q", "-s", "--tb=short", "-p", "no:cacheprovider"),
    *("-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps.

    Returns:
        0; 1 if a step failed or was cut off; 130 if interrupted.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    folder: Path = options.folder.resolve()
    code = 0
    if not options.only_tables:
        if missing := [name for name in _NEEDED if not importlib.util.find_spec(name)]:
            parser.error(f"{sys.executable} lacks {', '.join(missing)}: {_INSTALL}")
        nccl: Path | None = options.nccl
        if nccl and not nccl.is_file():
            if not (found := sorted(nccl.rglob("libnccl.so*"))):
                parser.error(f"--nccl {nccl}: there is no libnccl.so.2")
            nccl = found[0]
        folder.mkdir(parents=True, exist_ok=True)
        for old in ("results.jsonl", "logs.txt", "trace.*.json"):
            for path in folder.glob(old):
                path.unlink()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        run = _Run(folder, options.budget_s, options.tiny, nccl)
        try:
            run.all_steps(options.steps)
        except KeyboardInterrupt:
            code = 130
    return max(code, _report(folder))


class _Run:
    """One run of the command.

    Args:
        folder: where its files are.
        budget_s: how long it may take.
        is_tiny: whether sizes are those for an emulated GPU.
        nccl: the libnccl.so.2 for steps whose ranks share a GPU over NCCL.
    """

    def __init__(self, folder: Path, budget_s: float, is_tiny: bool, nccl: Path | None) -> None:
        self._end_s = time.monotonic() + budget_s - _RESERVE_S
        self._log, self._results = folder / "logs.txt", folder / "results.jsonl"
        self._environment = {
            MARK: uuid.uuid4().hex,
            RESULTS: str(self._results),
            "PYTHONPATH": _before(str(ROOT), "PYTHONPATH"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        is_emulated = hasattr(ctypes.CDLL(None), "emulated_gpu_synchronizations")
        self._is_tiny = is_tiny or is_emulated
        self._is_nccl_given = nccl is not None
        self._with_nccl = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        if nccl and not is_emulated:  # an emulated GPU has its own NCCL
            self._with_nccl["LD_PRELOAD"] = _before(str(nccl.resolve()), "LD_PRELOAD")
        append(self._results, {"kind": "run", "emulated": is_emulated})

    def all_steps(self, only: Sequence[str] | None) -> None:
        """Run the steps in order until the time is over; ``only`` names some of them."""
        self._run(steps_for(1)[0], _FIRST_S)
        steps = [step for step in self._steps() if only is None or step.name in only]
        for step in steps:
            if step.why_not:
                self._end(step, f"not run: {step.why_not}")
        to_run = [step for step in steps if not step.why_not]
        for k, step in enumerate(to_run):
            left_s = self._end_s - time.monotonic()
            self._run(step, allowance_s(left_s, [later.weight for later in to_run[k:]]))

    def _steps(self) -> list[Step]:
        """Choose the steps by what the first has found; one GPU is assumed if it failed."""
        found = next((r for r in read(self._results) if r["kind"] == "versions"), {})
        why_no_tests = "" if _test_files() else "the folder tests/ is not here"
        if importlib.util.find_spec("pytest") is None:
            why_no_tests = f"pytest cannot be imported: {_INSTALL}"
        return steps_for(
            found.get("num_gpus", 1),
            is_tiny=self._is_tiny,
            shares_by_nccl=self._is_nccl_given or _is_new(found.get("nccl", "0.0")),
            why_no_tests=why_no_tests,
        )[1:]

    def _run(self, step: Step, limit_s: float) -> None:
        if limit_s < SHORTEST_S:
            self._end(step, f"not run: {max(0.0, limit_s):.0f} s were left for it")
            return
        print(f"{step.name} (at most {limit_s:.0f} s) …", flush=True)
        append(self._results, {"kind": "begin", "name": step.name, "limit_s": limit_s})
        with self._log.open("a") as log:
            log.write(f"\n==== {step.name}\n")
        environment = self._environment | (self._with_nccl if step.with_nccl else {})
        outcome, seconds = run_all(_commands(step, limit_s), environment, limit_s, self._log)
        errors = [r for r in read(self._results) if r["kind"] == "error" and r["step"] == step.name]
        if errors:
            outcome = f"{outcome.partition(':')[0]}: {errors[0]['error']}"
        self._end(step, outcome, seconds)

    def _end(self, step: Step, outcome: str, seconds: float | None = None) -> None:
        print(f"{step.name}: {outcome}", flush=True)
        record = {"kind": "end", "name": step.name, "outcome": outcome, "seconds": seconds}
        append(self._results, record)


def _commands(step: Step, limit_s: float) -> list[list[str]]:
    """Return each rank's command."""
    if not step.function:
        return [[sys.executable, "-m", "pytest", *_PYTEST, *_test_files()]]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [step.function, step.name, json.dumps(step.options), str(time.time() + limit_s)]
    n = len(step.options["devices"])
    command = [sys.executable, "-m", "benchmarks.gpu.child", *words]
    return [[*command, str(rank), str(n), str(port)] for rank in range(n)]


def _test_files() -> list[str]:
    """List the files with tests for GPUs, so that no other file is imported."""
    files = sorted(ROOT.joinpath("tests").rglob("test_*.py"))
    marks = re.compile(r"mark\.(on_gpus|gpu)\b")
    return [str(file.relative_to(ROOT)) for file in files if marks.search(file.read_text())]


def _is_new(nccl: str) -> bool:
    return tuple(map(int, nccl.split(".")[:2])) >= (2, 30)


def _before(path: str, variable: str) -> str:
    """Put a path before those in a variable."""
    return os.pathsep.join(filter(None, [path, os.environ.get(variable)]))


def _report(folder: Path) -> int:
    """Print and write all findings; return 1 if a step has not ended well."""
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
    outcomes = {r["name"]: r.get("outcome", "") for r in records if r["kind"] in ("begin", "end")}
    return 0 if all(text.startswith(("done", "not run")) for text in outcomes.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--folder", type=Path, default=Path("build/gpu-hour"), help="for results")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all steps")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 from 2.30 on, or its folder")
    parser.add_argument("--tiny", action="store_true", help="sizes for an emulated GPU")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="only these, after versions")
    parser.add_argument(
        "--only-tables", action="store_true", help="of what FOLDER has; run nothing"
    )
    return parser
