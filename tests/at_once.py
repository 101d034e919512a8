"""Runs all tests on all cores: make test.

    python -m tests.at_once [arguments of pytest]

Starts one pytest for each core, up to 4. Each collects all tests, and runs those of the files that
it is the first to take. Files with tests that start processes come first; the others are short, and
so all end at about the same time. The output of the first pytest appears as it runs, that of each
other when it has ended. ``pytest`` alone runs all tests one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

#: Names the folder of a run, which has an empty file for each file of tests that was taken.
VARIABLE = "PROCPIPE_TESTS_AT_ONCE"

#: Processes at a time; more would need more than 16 GiB of memory.
MOST_PROCESSES = 4

#: What pytest ends with where no test was chosen.
NO_TESTS = 5

ROOT = Path(__file__).parents[1]


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if none failed."""
    start_s = time.monotonic()
    num_processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    # Each runs a part only, so its percentages would end anywhere.
    argv = [sys.executable, "-m", "pytest", "-o", "console_output_style=classic"]
    with tempfile.TemporaryDirectory(prefix="procpipe-tests-") as name:
        folder = Path(name)
        env = os.environ | {VARIABLE: name}
        # Without bytecode each pytest would compile all tests, which takes half of its start.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        processes = []
        for number in range(num_processes):
            log = (folder / f"log-{number}").open("wb") if number else None
            processes.append(
                subprocess.Popen(
                    [*argv, "-p", "tests.at_once", *arguments],
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log and subprocess.STDOUT,
                )
            )
            if log:
                log.close()
        codes = []
        for number, process in enumerate(processes):
            codes.append(wait_end(process))
            if number:
                text = (folder / f"log-{number}").read_text(errors="replace")
                print(f"\n==== process {number + 1} of {num_processes}\n{text}", flush=True)
        counts: Counter[str] = Counter()
        for file in folder.glob("counts-*"):
            counts.update(json.loads(file.read_text()))
    told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    print(f"all processes: {told} in {time.monotonic() - start_s:.0f} s; exit codes {codes}")
    return worst_of(codes)


def wait_end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a pytest, which an interrupt ends too; return its exit code."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def worst_of(codes: list[int]) -> int:
    """Return the exit code of a run whose processes ended with these."""
    if set(codes) == {NO_TESTS}:
        return NO_TESTS
    # One ended by a signal has a negative code.
    return max(abs(code) for code in codes if code != NO_TESTS)


# -- in each pytest --------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move files with tests that start processes to the front."""
    first = {item.path for item in items if item.get_closest_marker("dist")}
    items.sort(key=lambda item: item.path not in first)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over the tests of a file that another process has taken."""
    return None if is_taken_here(item.path) else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Leave the numbers of outcomes for the line that sums up all processes."""
    counts = {outcome: len(reports) for outcome, reports in terminalreporter.stats.items()}
    counts.pop("", None)  # set-up and tear-down
    counts.pop("deselected", None)
    Path(os.environ[VARIABLE], f"counts-{os.getpid()}").write_text(json.dumps(counts))


@functools.cache
def is_taken_here(path: Path) -> bool:
    """Take a file of tests; return whether no other process was first."""
    name = str(path.relative_to(ROOT)).replace("/", "-")
    try:
        Path(os.environ[VARIABLE], name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
