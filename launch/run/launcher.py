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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from procpipe.job.endings import LAUNCHER
from procpipe.launch.run.ranks import Attempt, Rank
from procpipe.launch.run.report import Report, report_on, short_path
from procpipe.launch.run.table import View

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_CHILD_SUBREAPER = 36

#: How long processes that ranks left behind may take to end after SIGTERM.
_LEFTOVER_GRACE_S = 2.0

#: The logger in which torch notes that it ends processes, before it waits for their end.
_OF_PROCESSES = "torch.distributed.elastic.multiprocessing.api"


class Stopped(SignalException):
    """The launcher got a signal to end; the agent passes the signal on to the ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the launcher got signal {number}", signal.Signals(number))


def end_descendants(grace_s: float) -> list[str]:
    """End all descendants of this process; return those that were alive, in words.

    They get SIGTERM and ``grace_s`` to end, then SIGKILL.
    """
    found: dict[psutil.Process, str] = {}
    deadline_s = time.monotonic() + grace_s
    while living := _descendants():
        is_late = time.monotonic() >= deadline_s
        for process in living:
            with contextlib.suppress(psutil.Error):
                if is_late:
                    process.kill()
                elif process not in found:
                    process.terminate()
                found.setdefault(process, f"{process.name()} (process {process.pid})")
        time.sleep(0.02)
    return list(found.values())


def _descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@dataclass
class Job:
    """What is to be run, and how it is shown."""

    config: LaunchConfig  # for torch's agent
    command: tuple[str, ...]  # what Python runs: ("train.py", …) or ("-m", "package.train", …)
    folder: Path  # where the logs go; it exists
    grace_s: int  # how long ranks may take to end after a signal, or a failure of another one
    view: str  # see ``table.View``


class Launcher:
    """One run from start to end, in the main thread of its process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._num_oom_kills = out_of_memory_kills()  # of earlier runs
        self._signal: signal.Signals | None = None
        self._is_over = False
        self._laggards = threading.Timer(0.0, lambda: None)
        self._view = View(lambda: self._attempt, job.view, f"logs in {short_path(job.folder)}")

    def run(self) -> int:
        """Run and report; return the exit code."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in _ENDING:
            signal.signal(number, self._stop)
        failures: dict[int, int] = {}
        error = ""
        try:
            failures = self._run_agent()
            self._is_over = True  # a signal that comes just before is caught below
        except SignalException as stopped:  # SIGQUIT is handled by the agent itself
            self._signal = self._signal or stopped.sigval
        except Exception as failed:  # no store, no room for logs, a missing host, …
            self._is_over = True
            logging.getLogger("torch.distributed.elastic").exception("the agent failed")
            error = f"{type(failed).__name__}: {failed}"
        self._is_over = True
        self._laggards.cancel()
        leftovers = end_descendants(_LEFTOVER_GRACE_S if self._signal is None else 0.0)
        self._view.stop()
        if self._signal is not None:
            name = "Ctrl-C" if self._signal is signal.SIGINT else self._signal.name
            self._view.print_last(f"procpipe: ended by {name} after {self._view.summary()}")
            return 128 + self._signal
        if failures or error:
            return self._report(failures, error)
        if leftovers:
            text = f"procpipe: ended what the run had left behind: {', '.join(leftovers)}"
            self._view.print_last(text)
        if self._job.view != "off":
            self._view.print_last(f"procpipe: done in {self._view.summary()}")
        return 0

    def _run_agent(self) -> dict[int, int]:
        """Run torch's agent; return the exit codes of this host's ranks that failed, in order."""
        self._log_to(self._job.folder / "launcher.log")
        self._job.config.logs_specs = _LogFolders(str(self._job.folder), self._begin)
        if self._job.config.max_nodes > 1:
            # Else a host that comes back never finds the store.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        try:
            launch_agent(self._job.config, sys.executable, ["-u", *self._job.command])
        except ChildFailedError as error:
            failed = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            return {rank: failure.exitcode for rank, failure in failed}
        return {}

    def _begin(self, envs: dict[int, dict[str, str]]) -> Attempt:
        """Begin an attempt, whose ranks have these variables; say why, if it is not the first."""
        folder = self._job.folder / f"attempt_{self._num_attempts}"
        numbers = [int(variables["RANK"]) for variables in envs.values()]
        ranks = [Rank(number, folder / f"rank_{number}") for number in numbers]
        num_ranks = int(envs[0]["WORLD_SIZE"])
        attempt = Attempt(num_ranks, ranks, int(envs[0]["TORCHELASTIC_RESTART_COUNT"]))
        if (last := self._attempt) is not None:
            why = f"restart with {num_ranks} ranks, because the set of hosts has changed"
            if last.failed or attempt.num_restarts > last.num_restarts:
                headline = report_on(last.ranks, last.failed).headline
                most = self._job.config.max_restarts
                why = f"restart {attempt.num_restarts} of {most}, because {headline}"
            self._view.print(f"procpipe: {why}")
        self._num_attempts += 1
        self._laggards.cancel()
        self._attempt = attempt
        return attempt

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first ends the run, the second kills."""
        if self._signal is None and not self._is_over:
            self._signal = signal.Signals(number)
            self._view.is_quiet = True
            name = "Ctrl-C" if self._signal is signal.SIGINT else self._signal.name
            again = "; again to kill them" if self._signal is signal.SIGINT else ""
            self._view.print(f"procpipe: {name}: ending all processes{again}")
            self._expect_ends()
            raise Stopped(number)
        self._view.print("procpipe: killing all processes")
        for process in _descendants():
            with contextlib.suppress(psutil.Error):
                process.kill()  # the agent waits for them, so this ends its wait

    def _log_to(self, path: Path) -> None:
        """Write the agent's log to a file only, and learn from it when it ends ranks."""
        handler = _AgentLog(path, self._ends_ranks)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("elastic", "launcher", "run"):
            logger = logging.getLogger(f"torch.distributed.{name}")
            logger.addHandler(handler)
            logger.propagate = False

    def _ends_ranks(self, record: logging.LogRecord) -> None:
        """The agent has noted that it ends ranks, or which one failed first."""
        attempt = self._attempt
        if attempt is None:
            return
        self._expect_ends()
        if record.levelno == logging.ERROR and isinstance(record.args, tuple):
            code, local_rank, *_ = record.args
            if isinstance(code, int) and isinstance(local_rank, int):
                attempt.failed[attempt.ranks[local_rank].number] = code

    def _expect_ends(self) -> None:
        """Kill ranks that do not end within the grace; the agent would wait for 30 s."""
        if self._attempt is None or self._laggards.is_alive():
            return
        self._attempt.look()
        processes = [rank.process for rank in self._attempt.ranks if rank.process is not None]
        self._laggards = threading.Timer(self._job.grace_s, _kill, [processes])
        self._laggards.daemon = True
        self._laggards.start()

    def _report(self, failures: dict[int, int], error: str) -> int:
        """Write the report of a failure, also into the run's folder; return the exit code."""
        if error or self._attempt is None:
            where = f"Logs: {short_path(self._job.folder)}/launcher.log"
            report = Report(f"torch's agent could not run the ranks: {error}", where, 1)
        else:
            num_oom_kills = out_of_memory_kills() - self._num_oom_kills
            ranks = self._attempt.ranks
            report = report_on(ranks, failures, num_oom_kills=num_oom_kills, shown=0)
            whole = report_on(ranks, failures, num_oom_kills=num_oom_kills)
            with contextlib.suppress(OSError):
                path = self._job.folder / "report.txt"
                path.write_text(f"{whole.headline}\n\n{whole.body}\n", encoding="utf-8")
        self._view.print_failure(f"procpipe: {report.headline}", report.body)
        self._view.print_last(f"\nExit code {report.exit_code} after {self._view.time_text()}")
        code: int = report.exit_code
        return code


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def out_of_memory_kills() -> int:
    """Return the out-of-memory kills in this process's control group; 0 if they are unknown."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        folder = next(line.partition("::")[2] for line in lines if "::" in line)
        events = Path("/sys/fs/cgroup", folder.lstrip("/"), "memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    except (OSError, ValueError, StopIteration, IndexError):
        return 0


class _LogFolders(LogsSpecs):  # type: ignore[misc, unused-ignore]
    """Gives each rank of each attempt a folder: ``attempt_0/rank_2/stdout.log``.

    torch's agent calls it when an attempt begins, which is how the launcher notices that.
    """

    def __init__(self, folder: str, begin: Callable[[dict[int, dict[str, str]]], Attempt]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._begin = begin

    @property
    def root_log_dir(self) -> str:
        return self._folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of an attempt that begins; ``envs`` is each rank's environment."""
        ranks = dict(zip(envs, self._begin(envs).ranks, strict=True))
        for local, rank in ranks.items():
            rank.folder.mkdir(parents=True)
            envs[local]["TORCHELASTIC_ERROR_FILE"] = str(rank.error)
            envs[local][LAUNCHER] = f"{os.getpid()} {envs[local]['TORCHELASTIC_RUN_ID']}"
        return LogsDest(
            stdouts={local: str(rank.stdout) for local, rank in ranks.items()},
            stderrs={local: str(rank.stderr) for local, rank in ranks.items()},
            error_files={local: str(rank.error) for local, rank in ranks.items()},
        )


class _AgentLog(logging.FileHandler):
    """The agent's log, opened at once: a script may remove the folder."""

    def __init__(self, path: Path, on_end: Callable[[logging.LogRecord], Any]) -> None:
        super().__init__(path)
        self._on_end = on_end

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.name == _OF_PROCESSES and record.levelno >= logging.WARNING:
            self._on_end(record)
