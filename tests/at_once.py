"""Runs all tests on all cores: make test.

    python -m tests.at_once [arguments of pytest]

Starts one pytest for each core, and one more since tests wait; up to 4. Each collects all tests,
and runs the files that no other pytest has taken before. Files with tests that start processes come
first; the others are short, so all end at about the same time. The first pytest prints as it runs;
the output of the others is printed when they have ended. ``pytest`` alone runs all tests one after
the other.
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
from typing import Any

import pytest

#: The folder of a run, which has an empty file for each file of tests that was taken.
VARIABLE = "PROCPIPE_TESTS_AT_ONCE"

#: Processes at a time; more would need more than 16 GiB of memory.
MOST_PROCESSES = 4

#: Pytest's exit code if no test was selected.
NO_TESTS = 5

ROOT = Path(__file__).parents[1]

#: Counts of one pytest.
NUM_RUN = pytest.StashKey[int]()
NUM_COLLECTED = pytest.StashKey[int]()


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if none failed."""
    start_s = time.monotonic()
    num_processes = min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES)
    with tempfile.TemporaryDirectory(prefix="procpipe-tests-") as name:
        folder = Path(name)
        logs = [folder / f"log-{number}" for number in range(1, num_processes)]
        processes = [start(arguments, folder, log) for log in (None, *logs)]
        codes = [wait_end(processes[0])]
        for log, process in zip(logs, processes[1:], strict=True):
            codes.append(wait_end(process))
            print(f"\n==== the next process\n{log.read_text(errors='replace')}", flush=True)
        parts = [json.loads(file.read_text()) for file in folder.glob("part-*")]
    outcomes: Counter[str] = Counter()
    for part in parts:
        outcomes.update(part["outcomes"])
    summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    num_left = num_never_run(parts)
    if num_left:
        summary += f"; NEVER RUN: {num_left}"
    print(f"all processes: {summary} in {time.monotonic() - start_s:.0f} s, exit codes {codes}")
    return worst_of(codes) or int(num_left > 0)


def start(arguments: list[str], folder: Path, log: Path | None) -> subprocess.Popen[bytes]:
    """Start a pytest that writes to the terminal, or to a file."""
    # Each runs a part of the tests, so a percentage of all would not reach 100.
    argv = ["-m", "pytest", "-p", "tests.at_once", "-o", "console_output_style=classic"]
    env = os.environ | {VARIABLE: str(folder)}
    # Without bytecode each pytest would compile all tests, which is more than half of its start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("wb")) if log else None
        return subprocess.Popen(
            [sys.executable, *argv, *arguments],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file and subprocess.STDOUT,
        )


def wait_end(process: subprocess.Popen[bytes]) -> int:
    """Wait until a pytest ends, also after an interrupt; return its exit code."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def worst_of(codes: list[int]) -> int:
    """Return the exit code of a run from those of its processes."""
    if set(codes) == {NO_TESTS}:
        return NO_TESTS
    # The exit code of a process that a signal ended is negative.
    return max(abs(code) for code in codes if code != NO_TESTS)


def num_never_run(parts: list[dict[str, Any]]) -> int:
    """Return how many collected tests were run by no process."""
    num_collected = max((part["num_collected"] for part in parts), default=0)
    return int(num_collected - sum(part["num_run"] for part in parts))


# -- in each pytest --------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files with tests that start processes to the front."""
    first = {item.path for item in items if item.get_closest_marker("dist")}
    items.sort(key=lambda item: item.path not in first)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests of the files that no other process has taken."""
    if session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop reports why it runs nothing
    # One test ahead: which fixtures stay set up depends on the next test of this process.
    taken = (item for item in session.items if is_taken_here(item.path))
    item = next(taken, None)
    while item is not None:
        following = next(taken, None)
        session.config.stash[NUM_RUN] = session.config.stash.get(NUM_RUN, 0) + 1
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write the counts of this process, for the summary of all processes."""
    outcomes = {name: len(reports) for name, reports in terminalreporter.stats.items()}
    outcomes.pop("", None)  # set-ups and tear-downs
    outcomes.pop("deselected", None)
    part = {
        "outcomes": outcomes,
        "num_run": config.stash.get(NUM_RUN, 0),
        "num_collected": config.stash.get(NUM_COLLECTED, 0),
    }
    Path(os.environ[VARIABLE], f"part-{os.getpid()}").write_text(json.dumps(part))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Store how many tests were collected."""
    session.config.stash[NUM_COLLECTED] = len(session.items)


@functools.cache
def is_taken_here(path: Path) -> bool:
    """Take a file of tests; return whether this process was the first."""
    name = str(path).replace("/", "-")
    try:
        Path(os.environ[VARIABLE], name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
