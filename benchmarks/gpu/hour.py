"""The first time on a real GPU: tests, parity, figures, the most important first, within a budget.

It takes a few minutes and needs no network. Each step is a command with a part of the time, and
what it has found is written when it ends.

    FOLDER/gpu.txt      what was run, and all tables; written anew after each step
    FOLDER/STEP/        the tables and the raw figures (JSON) of a step
    FOLDER/logs.txt     all output of all processes
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.plugin import TESTS
from benchmarks.gpu.steps import SHORTEST_S, Step, allowance_s, steps_for

ROOT = Path(__file__).parents[2]

#: The variable that marks all processes of a run, including those that its processes start.
MARK = "PROCPIPE_GPU_HOUR"

#: Kept at the end for processes that are slow to end.
_RESERVE_S = 5.0

#: How long torch may take to find the GPUs.
_FIND_LIMIT_S = 60.0

#: How long a process may take to write its stacks and end, after its step's time is over.
_STACKS_S = 2.0

#: What procpipe imports beside the standard library, and torch.distributed to gather objects.
_NEEDED = ("torch", "psutil", "numpy")

_INSTALL = "carry its wheel, install it by pip install --target FOLDER, and set PYTHONPATH=FOLDER"

#: Without the time limits of a plugin that may not be there: the step has its own.
_PYTEST = (
    *("-p", "benchmarks.gpu.plugin", "--gpus", "-q", "-s", "--tb=short", "-p", "no:cacheprovider"),
    *("-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"),
)

_FIND = """
import json, torch
from benchmarks.gpu.checks import nccl_version
found = {"num_gpus": torch.cuda.device_count(), "name": torch.cuda.get_device_name(0)}
print(json.dumps(found | {"nccl": nccl_version()}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps.

    Returns:
        0; 1 if a step failed or was cut off; 130 if interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--folder", type=Path, default=Path("build/gpu-hour"), help="for results")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all steps")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 from 2.30 on, or its folder")
    parser.add_argument("--tiny", action="store_true", help="sizes for an emulated GPU")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="only these")
    options = parser.parse_args(argv)
    if missing := [name for name in _NEEDED if not importlib.util.find_spec(name)]:
        parser.error(f"{sys.executable} lacks {', '.join(missing)}: {_INSTALL}")
    nccl: Path | None = options.nccl
    if nccl and not nccl.is_file():
        if not (found := sorted(nccl.rglob("libnccl.so*"))):
            parser.error(f"--nccl {nccl}: there is no libnccl.so.2")
        nccl = found[0]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Run(options.folder.resolve(), options.budget_s, options.tiny, nccl)
    try:
        run.all_steps(options.steps)
    except KeyboardInterrupt:
        return 130
    return 0 if run.is_well() else 1


@dataclass(frozen=True)
class Ended:
    """How a step ended: "done", "failed: …", "cut off" or "not run: …"; its seconds and limit."""

    step: Step
    outcome: str
    seconds: float | None = None
    limit_s: float | None = None


class Run:
    """One run of the command.

    Args:
        folder: where its files are.
        budget_s: how long it may take.
        is_tiny: whether sizes are those for an emulated GPU.
        nccl: the libnccl.so.2 for steps whose ranks share a GPU over NCCL.
    """

    def __init__(self, folder: Path, budget_s: float, is_tiny: bool, nccl: Path | None) -> None:
        self._end_s = time.monotonic() + budget_s - _RESERVE_S
        self._folder, self._log, self._tests = folder, folder / "logs.txt", folder / "tests.jsonl"
        self._is_tiny = is_tiny
        self._nccl = nccl
        self._ended: list[Ended] = []
        self._environment = {
            MARK: uuid.uuid4().hex,
            TESTS: str(self._tests),
            "PYTHONPATH": _before(str(ROOT), "PYTHONPATH"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        folder.mkdir(parents=True, exist_ok=True)
        for old in (self._log, self._tests, *folder.glob("*/*.txt")):
            old.unlink(missing_ok=True)

    def all_steps(self, only: Sequence[str] | None) -> None:
        """Run the steps in order until the time is over; ``only`` names some of them."""
        found = self._find()
        self._is_tiny |= "Emulated" in found["name"]
        is_new = tuple(map(int, found["nccl"].split(".")[:2])) >= (2, 30)
        why_no_tests = "" if _test_files() else "the folder tests/ is not here"
        if importlib.util.find_spec("pytest") is None:
            why_no_tests = f"pytest cannot be imported: {_INSTALL}"
        steps = steps_for(
            found["num_gpus"],
            shares_by_nccl=self._nccl is not None or is_new,
            why_no_tests=why_no_tests,
        )
        steps = [step for step in steps if only is None or step.name in only]
        to_run = [step for step in steps if not step.why_not]
        for step in steps:
            if step.why_not:
                self._end(Ended(step, f"not run: {step.why_not}"))
        for k, step in enumerate(to_run):
            left_s = self._end_s - time.monotonic()
            limit_s = allowance_s(left_s, [later.weight for later in to_run[k:]])
            self._run(step, limit_s)

    def is_well(self) -> bool:
        """Say whether no step has failed or was cut off."""
        return all(ended.outcome.startswith(("done", "not run")) for ended in self._ended)

    def _find(self) -> dict[str, Any]:
        """Find the GPUs, in a process of its own: a driver may hang; one is assumed if it fails."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", _FIND],
                cwd=ROOT,
                env=os.environ | self._environment,
                capture_output=True,
                text=True,
                timeout=_FIND_LIMIT_S,
                check=True,
            )
        except subprocess.SubprocessError as error:
            print(f"torch finds no GPU: {error}; one is assumed", file=sys.stderr)
            return {"num_gpus": 1, "name": "", "nccl": "0.0"}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _run(self, step: Step, limit_s: float) -> None:
        if limit_s < SHORTEST_S:
            self._end(Ended(step, f"not run: {max(0.0, limit_s):.0f} s were left for it"))
            return
        print(f"{step.name} (at most {limit_s:.0f} s) …", flush=True)
        with self._log.open("a") as log:
            log.write(f"\n==== {step.name}\n")
        environment = dict(self._environment)
        if step.num_gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = _first_gpus(step.num_gpus)
        if step.with_nccl:
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        # The tests that need it set the variable themselves. An emulated GPU has its own NCCL.
        if (step.with_nccl or not step.words) and self._nccl and not self._is_tiny:
            environment["LD_PRELOAD"] = _before(str(self._nccl.resolve()), "LD_PRELOAD")
        outcome, seconds = run_limited(self._command(step), environment, limit_s, self._log)
        self._end(Ended(step, outcome, seconds, limit_s))

    def _command(self, step: Step) -> list[str]:
        if not step.words:
            return [sys.executable, "-m", "pytest", *_PYTEST, *_test_files()]
        words = [*step.words, "--device", "cuda", "--out", str(self._folder / step.name)]
        words += ["--sizes", "tiny"] if self._is_tiny else []
        return [sys.executable, "-m", "benchmarks", *words]

    def _end(self, ended: Ended) -> None:
        print(f"{ended.step.name}: {ended.outcome}", flush=True)
        self._ended.append(ended)
        texts = [overview(self._ended), *tests_text(self._tests)]
        for each in self._ended:
            files = sorted((self._folder / each.step.name).glob("*.txt"))
            texts += [f"==== {each.step.name}\n\n{file.read_text()}" for file in files]
        self._folder.joinpath("gpu.txt").write_text("\n\n".join(texts))


# -- processes ------------------------------------------------------------------------------------


def run_limited(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, log: Path
) -> tuple[str, float]:
    """Run a command, and return when it and all processes that it started have ended.

    Args:
        command: what is run.
        environment: variables to add, one of them ``MARK``.
        limit_s: when all processes write their stacks and are ended.
        log: the file that their output is added to.

    Returns:
        "done", "cut off", or "failed: " and the last line that was printed; seconds.
    """
    start_s = time.monotonic()
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = process.wait(limit_s)
        outcome = "done" if code == 0 else f"failed: {_last_error(log)}"
    except subprocess.TimeoutExpired:
        outcome = "cut off"
        mark, end_s = environment[MARK], time.monotonic() + _STACKS_S
        signal_all(mark, signal.SIGABRT)
        while (process.poll() is None or signal_all(mark, 0)) and time.monotonic() < end_s:
            time.sleep(0.02)
    finally:
        _kill_all(environment[MARK])
    return outcome, time.monotonic() - start_s


def _last_error(log: Path) -> str:
    """Return the last line that names an error, or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-200:] if re.match(r"[\w.\[\]:]*Error\b", line)]
    return (errors or lines or ["no output"])[-1][:300]


def _kill_all(mark: str) -> None:
    """Kill what is left of a step, in any session."""
    deadline_s = time.monotonic() + _RESERVE_S
    while signal_all(mark, signal.SIGKILL) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def signal_all(mark: str, number: int) -> int:
    """Send a signal to all processes with the mark that have not ended; return how many."""
    entry = f"{MARK}={mark}".encode()
    num_found = 0
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in file.read_bytes().split(b"\0") and int(file.parent.name) != os.getpid():
                os.kill(int(file.parent.name), number)
                num_found += 1
    return num_found


def _test_files() -> list[str]:
    """List the files with tests for GPUs, so that no other file is imported."""
    files = sorted(ROOT.joinpath("tests").rglob("test_*.py"))
    marks = re.compile(r"mark\.(on_gpus|gpu)\b")
    return [str(file.relative_to(ROOT)) for file in files if marks.search(file.read_text())]


def _first_gpus(number: int) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for the first of the GPUs that are visible now."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(visible.split(",")[:number] if visible else map(str, range(number)))


def _before(path: str, variable: str) -> str:
    """Put a path before those in a variable."""
    return os.pathsep.join(filter(None, [path, os.environ.get(variable)]))


# -- tables ---------------------------------------------------------------------------------------


def overview(ended: Sequence[Ended]) -> str:
    """Lay out how each step ended."""
    from benchmarks.report import Table

    rows: list[list[Any]] = []
    notes = []
    for each in ended:
        outcome, _, why = each.outcome.partition(": ")
        rows.append([each.step.name, outcome, each.seconds, each.limit_s])
        notes += [f"{each.step.name} {outcome}: {why}"] if why else []
    headings = ["", "outcome", "s", "of at most"]
    return Table("what was run", headings, rows, ["s", ".0f", ".0f"], notes).to_text()


def tests_text(path: Path) -> list[str]:
    """Lay out the tests that have ended so far, with those that failed; empty if there are none."""
    from benchmarks.report import Table

    tests = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # cut off
            tests.append(json.loads(line))
    if not tests:
        return []
    counts = Counter(test["outcome"] for test in tests)
    skipped = Counter(test["why"] for test in tests if test["outcome"] == "skipped")
    rows = [
        [test["name"].removeprefix("tests/"), test["seconds"], test["why"][:100]]
        for test in tests
        if test["outcome"] == "failed"
    ]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    notes = [f"{count} skipped: {why}" for why, count in skipped.most_common()]
    headings = ["failed", "s", "error"] if rows else ["none failed", "", ""]
    title = f"tests for GPUs: {outcomes}"
    return [Table(title, headings, rows, [".1f", "s"], notes).to_text()]
