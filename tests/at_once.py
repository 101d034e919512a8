"""Runs all tests on all cores: make test.

    python -m tests.at_once [arguments of pytest]

Collects all tests once, then forks: one process for each core, and one more since tests wait; up to
4. Each runs the files that no other process has taken before. Files with tests that start processes
come first; the others are short, so all end at about the same time. The first process prints as it
runs; the output of the others is printed when they have ended. ``pytest`` alone runs all tests one
after the other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
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


def main(arguments: list[str]) -> int:
    """Run the tests; return 0 if none failed."""
    start_s = time.monotonic()
    os.chdir(ROOT)
    # Torch reads this when imported; with more than 1 it would start threads, which forks lack.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Without bytecode each run would compile all tests, which is half of collecting them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    with tempfile.TemporaryDirectory(prefix="procpipe-tests-") as name:
        folder = Path(name)
        os.environ[VARIABLE] = name
        plugin = AtOnce(folder, min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES))
        # Each runs a part of the tests, so a percentage of all would not reach 100.
        argv = ["-o", "console_output_style=classic", *arguments]
        codes = [int(pytest.main(argv, plugins=[plugin]))]
        if plugin.is_fork:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])
        for pid, log in plugin.logs.items():
            codes.append(wait_end(pid))
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


def wait_end(pid: int) -> int:
    """Wait until a fork ends, also after an interrupt; return its exit code."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


class AtOnce:
    """The plugin of pytest that forks after the collection, and distributes the files of tests.

    Attributes:
        logs: of the forks, by their process ids.
        is_fork: whether this process is a fork.
    """

    def __init__(self, folder: Path, num_processes: int) -> None:
        self.logs: dict[int, Path] = {}
        self.is_fork = False
        self._folder = folder
        self._num_processes = num_processes
        self._num_run = 0
        self._num_collected = 0

    def pytest_collection(self) -> None:
        """Start the fork server, which imports while tests are collected."""
        from tests.dist.forks import fork_server

        fork_server()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Move the files with tests that start processes to the front."""
        first = {item.path for item in items if item.get_closest_marker("dist")}
        items.sort(key=lambda item: item.path not in first)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Store how many tests were collected."""
        self._num_collected = len(session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Fork, and run the tests of the files that no other process has taken."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop reports why it runs nothing
        for number in range(1, self._num_processes):
            if self._fork(session.config, self._folder / f"log-{number}"):
                break
        # One test ahead: which fixtures stay set up depends on the next test of this process.
        taken = (item for item in session.items if is_taken_here(item.path))
        item = next(taken, None)
        while item is not None:
            following = next(taken, None)
            self._num_run += 1
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the counts of this process, for the summary of all processes."""
        outcomes = {name: len(reports) for name, reports in terminalreporter.stats.items()}
        outcomes.pop("", None)  # set-ups and tear-downs
        outcomes.pop("deselected", None)
        part = {
            "outcomes": outcomes,
            "num_run": self._num_run,
            "num_collected": self._num_collected,
        }
        (self._folder / f"part-{os.getpid()}").write_text(json.dumps(part))

    def _fork(self, config: pytest.Config, log: Path) -> bool:
        """Fork this process; return whether it is the fork, which writes to a file from now on."""
        from tests.dist.forks import fork_server

        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads: a fork would have only one"
        log.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        with fork_server().copy() as requests:
            pid = os.fork()
            if pid != 0:
                self.logs[pid] = log
                return False
            fork_server().use(requests.dup())
        self.is_fork = True
        # Captured output goes to files, which must not be those of the first process.
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        return True


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
