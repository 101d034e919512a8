"""Runs all tests on all cores: ``pytest`` without paths, as ``make test`` does.

Collects all tests once, then forks: one process for each core, and one more since tests wait; up to
4. Each runs the files that no other process has taken before. Files with tests that start processes
come first; the others are short, so all end at about the same time. The first process prints as it
runs; the output of the others is printed when they have ended. ``pytest tests`` runs all tests one
after the other; so do ``-s`` and the options in ``ONE_PROCESS``, such as ``-x`` and ``--pdb``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

# Torch and NumPy read this when they are imported, later. With more than 1 they would start
# threads, which a fork does not have. On busy cores these threads also wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

#: Processes at a time; more would need more than 16 GiB of memory.
MOST_PROCESSES = 4


#: Options that stop between tests, or for which one process has to know all results.
ONE_PROCESS = (
    "collectonly", "failedfirst", "gpus", "lf", "maxfail", "stepwise", "trace", "usepdb", "xmlpath",
)  # fmt: skip


def is_wanted(config: pytest.Config) -> bool:
    """Say whether a run is to be divided: one without paths, those options or ``-s``."""
    is_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    shows_output = config.option.capture == "no"
    return is_all and not (shows_output or any(config.getoption(o, None) for o in ONE_PROCESS))


def wait_end(pid: int) -> int:
    """Wait until a fork ends, also after an interrupt; return its exit code."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def worst_of(codes: Iterable[int]) -> int:
    """Return the exit code of a run from those of its processes."""
    # The exit code of a process that a signal ended is negative.
    return max(map(abs, codes))


def num_never_run(parts: list[dict[str, Any]]) -> int:
    """Return how many collected tests were run by no process."""
    num_collected = max((part["num_collected"] for part in parts), default=0)
    return int(num_collected - sum(part["num_run"] for part in parts))


class AtOnce:
    """The plugin of pytest that forks after the collection, and distributes the files of tests."""

    def __init__(self) -> None:
        self._num_processes = min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES)
        self._folder: Path | None = None  # with an empty file for each file of tests that was taken
        self._logs: dict[int, Path] = {}  # of the forks, by their process ids
        self._is_fork = False
        self._num_run = 0
        self._start_s = time.monotonic()

    def pytest_collection(self) -> None:
        """Start the fork server, which imports while tests are collected."""
        from tests.dist.forks import fork_server

        fork_server()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Move the files with tests that start processes to the front."""
        first = {item.path for item in items if item.get_closest_marker("dist")}
        items.sort(key=lambda item: item.path not in first)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Fork, and run the tests of the files that no other process has taken."""
        if session.testsfailed:
            return None  # pytest's own loop reports why it runs nothing
        self._session = session
        self._folder = Path(tempfile.mkdtemp(prefix="procpipe-tests-"))
        num_files = len({item.path for item in session.items})
        for number in range(1, min(self._num_processes, num_files)):
            if self._fork(session.config, self._folder / f"log-{number}"):
                break
        # One test ahead: which fixtures stay set up depends on the next test of this process.
        is_taken = functools.cache(functools.partial(is_taken_here, self._folder))
        taken = (item for item in session.items if is_taken(item.path))
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
        if self._folder is None:
            return
        reports = terminalreporter.stats
        outcomes = {name: len(found) for name, found in reports.items()}
        outcomes.pop("", None)  # set-ups and tear-downs
        outcomes.pop("deselected", None)
        failed = [*reports.get("failed", ()), *reports.get("error", ())]
        part = {
            "outcomes": outcomes,
            "failed": [report.nodeid for report in failed],
            "num_run": self._num_run,
            "num_collected": len(self._session.items),
        }
        (self._folder / f"part-{os.getpid()}").write_text(json.dumps(part))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """End the forks, and print the summary of all processes."""
        if self._folder is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self._is_fork:
            os._exit(int(self._session.exitstatus))
        codes = [int(self._session.exitstatus)]
        for pid, log in self._logs.items():
            codes.append(wait_end(pid))
            print(f"\n==== the next process\n{log.read_text(errors='replace')}", flush=True)
        parts = [json.loads(file.read_text()) for file in self._folder.glob("part-*")]
        shutil.rmtree(self._folder)
        if config.cache is not None:  # for --last-failed
            failed = {nodeid: True for part in parts for nodeid in part["failed"]}
            config.cache.set("cache/lastfailed", failed)
        outcomes: Counter[str] = Counter()
        for part in parts:
            outcomes.update(part["outcomes"])
        summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        num_left = num_never_run(parts)
        if num_left:
            summary += f"; NEVER RUN: {num_left}"
        took_s = time.monotonic() - self._start_s
        print(f"all processes: {summary} in {took_s:.0f} s, exit codes {codes}", flush=True)
        self._session.exitstatus = worst_of([*codes, int(num_left > 0)])

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
                self._logs[pid] = log
                return False
            fork_server().use(requests.dup())
        self._is_fork = True
        # Captured output goes to files, which must not be those of the first process.
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        return True


def is_taken_here(folder: Path, path: Path) -> bool:
    """Take a file of tests; return whether this process was the first."""
    name = str(path).replace("/", "-")
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
