"""Runs a script's ranks by torch's elastic agent, and ends all that is left of them.

    launcher ──┬── rank 0 ── worker
               └── rank 1 ── worker

    1  the launcher adopts the orphans among its descendants
    2  the agent runs the ranks, in the main thread; another thread shows them (``table.py``)
    3  the launcher ends what is left of its descendants
    4  the view stops, and the last line or the report is written

After the first SIGINT, SIGTERM or SIGHUP the ranks have a few seconds to end; a second one kills
everything. If the launcher itself is killed, the kernel kills the ranks that have made a ``Stage``,
and the others end when they make one (``procpipe.job.endings``). What these have started may
survive.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from procpipe.job.endings import LAUNCHER
from procpipe.launch.run.ranks import Rank
from procpipe.launch.run.report import Report, report_on, short_path
from procpipe.launch.run.table import View

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_CHILD_SUBREAPER = 36

#: How long processes that ranks left behind may take to end after SIGTERM.
_LEFTOVER_GRACE_S = 2.0

#: How long a killed process may take: one that waits for a broken driver never ends.
_KILL_S = 30.0


class Launcher(LogsSpecs):  # type: ignore[misc, unused-ignore]
    """One run from start to end, in the main thread of its process.

    torch's agent asks it, when an attempt begins, where the output of each rank goes.

    Args:
        config: for that agent.
        words: what Python runs: ("train.py", …) or ("-m", "package.train", …).
        folder: where the logs go; it exists.
        is_quiet: whether to show rank 0's output and failures only.
    """

    def __init__(
        self, config: LaunchConfig, words: Sequence[str], folder: Path, *, is_quiet: bool
    ) -> None:
        super().__init__(str(folder))
        self._config, self._words, self._folder = config, words, folder
        self._is_quiet = is_quiet
        self._ranks: list[Rank] = []  # of the newest attempt
        self._num_attempts = self._num_restarts = 0
        self._num_oom_kills = out_of_memory_kills()  # of earlier runs
        self._signal: signal.Signals | None = None
        self._is_over = False
        caption = f"logs in {short_path(folder)}"
        self._view = View(lambda: self._ranks, caption, is_quiet=is_quiet)

    def run(self) -> int:
        """Run and report; return the exit code."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Before there are ranks a signal just ends this process: torch may wait for another host's
        # store in C++, where no handler of Python's runs.
        self._handle(signal.SIG_DFL)
        failed: list[Rank] = []
        error = ""
        try:
            failed = self._run_agent()
            self._is_over = True  # a signal that comes just before is caught below
        except SignalException as stopped:  # SIGQUIT is handled by the agent itself
            self._signal = self._signal or stopped.sigval
        except Exception as failure:  # no store, no room for logs, a missing host, …
            self._is_over = True
            logging.getLogger("torch.distributed").exception("the agent failed")
            failed, error = self._noted(), f"{type(failure).__name__}: {failure}"
        self._is_over = True
        leftovers = end_descendants(_LEFTOVER_GRACE_S if self._signal is None else 0.0)
        self._view.stop()
        if self._signal is not None:
            name, summary = self._signal.name, self._view.summary()
            self._view.print_last(f"procpipe: ended by {name} after {summary}")
            return 128 + self._signal
        if failed or error:
            return self._report(failed, error)
        if leftovers:
            text = f"procpipe: ended what the run had left behind: {', '.join(leftovers)}"
            self._view.print_last(text)
        if not self._is_quiet:
            self._view.print_last(f"procpipe: done in {self._view.summary()}")
        return 0

    def _run_agent(self) -> list[Rank]:
        """Run torch's agent; return this host's ranks that failed, in that order."""
        # Opened at once: a script may remove the folder.
        handler = logging.FileHandler(self._folder / "launcher.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("torch.distributed").handlers = [handler]
        self._config.logs_specs = self
        if self._config.max_nodes > 1:
            # Else a host that comes back never finds the store.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
            self._view.print(f"procpipe: waits for hosts at {self._config.rdzv_endpoint}")
        try:
            launch_agent(self._config, sys.executable, ["-u", *self._words])
        except ChildFailedError as error:
            failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            by_number = {rank.number: rank for rank in self._ranks}
            for number, failure in failures:
                by_number[number].code = failure.exitcode
            return [by_number[number] for number, _ in failures]
        return []

    def _noted(self) -> list[Rank]:
        """Return this host's ranks that have noted a failure, their own or that of another."""
        return [rank for rank in self._ranks if rank.exception() or rank.note()]

    def _handle(self, handler: Any) -> None:
        for number in _ENDING:
            # Under nohup it stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)

    @property
    def root_log_dir(self) -> str:
        """The folder of the logs."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Begin an attempt, and make the folders of its ranks: ``attempt_0/rank_2/stdout.log``.

        ``envs`` holds the environment variables of each rank of this host.
        """
        self._handle(self._stop)
        folder, ranks = self._folder / f"attempt_{self._num_attempts}", []
        for variables in envs.values():
            number = int(variables["RANK"])
            rank = Rank(number, folder / f"rank_{number}")
            rank.folder.mkdir(parents=True)
            rank.stdout.touch()
            rank.stderr.touch()
            variables["TORCHELASTIC_ERROR_FILE"] = str(rank.error)
            variables[LAUNCHER] = f"{os.getpid()} {variables['TORCHELASTIC_RUN_ID']}"
            ranks.append(rank)
        num_restarts = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if self._ranks:
            failed = self._noted()
            why = "the set of hosts has changed"
            if failed or num_restarts > self._num_restarts:
                why = report_on(self._ranks, failed).headline.partition(";")[0]
            text = f"restart {num_restarts} of {self._config.max_restarts}"
            text += f", with {envs[0]['WORLD_SIZE']} ranks, because {why}"
            self._view.print(f"procpipe: {text}")
        self._ranks, self._num_restarts = ranks, num_restarts
        self._num_attempts += 1
        return LogsDest(
            stdouts={local: str(rank.stdout) for local, rank in enumerate(ranks)},
            stderrs={local: str(rank.stderr) for local, rank in enumerate(ranks)},
            error_files={local: str(rank.error) for local, rank in enumerate(ranks)},
        )

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first ends the run, the second kills."""
        if self._signal is None and not self._is_over:
            self._signal = signal.Signals(number)
            self._view.shows_errors = False  # tracebacks of KeyboardInterrupt
            again = "; again to kill them" if number == signal.SIGINT else ""
            self._view.print(f"procpipe: {self._signal.name}: ending all processes{again}")
            # The agent passes it on to the ranks.
            raise SignalException(f"the launcher got signal {number}", self._signal)
        self._view.print("procpipe: killing all processes")
        end_descendants(0.0)  # the agent waits for them, so this ends its wait

    def _report(self, failed: list[Rank], error: str) -> int:
        """Write the report of a failure, also into the run's folder; return the exit code."""
        where = f"Logs: {short_path(self._folder)}/launcher.log"
        report = Report(f"torch's agent could not run the ranks: {error}", where, 1)
        if failed:
            num_oom_kills = out_of_memory_kills() - self._num_oom_kills
            report = report_on(self._ranks, failed, num_oom_kills=num_oom_kills)
        text = f"procpipe: {report.headline}\n\n{report.body}\n"
        with contextlib.suppress(OSError):
            (self._folder / "report.txt").write_text(text, encoding="utf-8")
        self._view.print_last(f"procpipe: {report.headline}", "bold red")
        end = f"Exit code {report.exit_code} after {self._view.time_text()}"
        self._view.print_last(f"\n{report.body}\n\n{end}")
        return int(report.exit_code)


def end_descendants(grace_s: float) -> list[str]:
    """End all descendants of this process; return those that were alive, in words.

    They get SIGTERM and ``grace_s`` to end, then SIGKILL.
    """
    found: dict[psutil.Process, str] = {}
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s + _KILL_S:
        is_late, any_lives = time.monotonic() >= deadline_s, False
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                any_lives = True
                if is_late:
                    process.kill()
                elif process not in found:
                    process.terminate()
                found.setdefault(process, f"{process.name()} (process {process.pid})")
        if not any_lives:
            break
        time.sleep(0.02)
    return list(found.values())


def out_of_memory_kills() -> int:
    """Return the out-of-memory kills in this process's control group; 0 if they are unknown."""
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2]
        events = Path("/sys/fs/cgroup", group, "memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    return 0
