"""Runs torch's elastic agent, which does rendezvous, start, supervision and restart of ranks.

The only module that uses it. The agent runs in the main thread of the launcher and logs to a file.
When it starts the ranks, it calls ``_LogFolders`` for the files of their output; this call is how
the launcher notices a new attempt.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.numa.binding import AffinityMode, NumaOptions

from procpipe.launch.run.ranks import Logs

#: Called when an attempt begins, with the files of this host's ranks, the number of ranks of all
#: hosts, and the number of restarts after failures.
OnAttempt = Callable[[Sequence[Logs], int, int], object]


@dataclass
class Job(LaunchConfig):  # type: ignore[misc, unused-ignore]
    """What the agent is to run: torch's settings, some with other defaults, and more."""

    rdzv_backend: str = "c10d"
    monitor_interval: float = 0.1
    signals_to_handle: str = "SIGQUIT"  # the launcher handles the others itself
    grace_s: int = 5  # how long ranks may take to end after a signal
    numa_binding: str = ""  # torch's own binding to NUMA nodes; "" for none
    command: tuple[str, ...] = ()  # what Python runs: ("train.py", …) or ("-m", "package.train", …)
    folder: Path = Path()  # where the logs go
    on_attempt: OnAttempt | None = None

    def __post_init__(self) -> None:
        self.logs_specs = _LogFolders(self)
        self.shutdown_timeout = self.grace_s  # torch 2.11 has no such setting
        if self.numa_binding:
            self.numa_options = NumaOptions(AffinityMode(self.numa_binding))
        super().__post_init__()  # type: ignore[no-untyped-call, unused-ignore]


@dataclass(frozen=True)
class JobOutcome:
    """How the agent's run ended."""

    #: Exit codes, by rank, of this host's ranks that failed; none after success.
    codes: dict[int, int]
    error: str = ""  # why the agent could not run them, "" if it could

    @property
    def is_good(self) -> bool:
        """Whether all ranks succeeded."""
        return not self.codes and not self.error


class Stopped(SignalException):
    """The launcher got a signal to end; the agent passes the signal on to the ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the launcher got signal {number}", signal.Signals(number))


def run_job(job: Job, on_attempt: OnAttempt) -> JobOutcome:
    """Run a job to its end, in the main thread; its logs' folder exists.

    Raises:
        Stopped: a signal handler raised it; the ranks have been signalled, and given ``grace_s``.
    """
    _log_to(job.folder / "launcher.log")
    job.on_attempt = on_attempt
    if job.max_nodes > 1:
        # Else a host that comes back never finds the store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        launch_agent(job, sys.executable, ["-u", *job.command])
    except ChildFailedError as error:
        return JobOutcome({rank: failure.exitcode for rank, failure in error.failures.items()})
    except Stopped:
        raise
    except SignalException as error:  # SIGQUIT, the one signal that the agent handles
        raise Stopped(error.sigval) from error
    except Exception as error:  # no store, no room for logs, a missing host, …
        logging.getLogger("torch.distributed.elastic").exception("the agent failed")
        return JobOutcome({}, f"{type(error).__name__}: {error}")
    return JobOutcome({})


class _LogFolders(LogsSpecs):  # type: ignore[misc, unused-ignore]
    """Gives each rank of each attempt a folder: ``attempt_0/rank_2/stdout.log``."""

    def __init__(self, job: Job) -> None:
        super().__init__(str(job.folder))
        self._job = job
        self._num_attempts = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._job.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of an attempt that begins; ``envs`` is each rank's environment."""
        attempt = self._job.folder / f"attempt_{self._num_attempts}"
        self._num_attempts += 1
        logs = {}
        for local, environment in envs.items():
            folder, rank = attempt / f"rank_{environment['RANK']}", int(environment["RANK"])
            folder.mkdir(parents=True)
            files = (folder / name for name in ("stdout.log", "stderr.log", "error.json"))
            logs[local] = Logs(rank, *files)
            environment["TORCHELASTIC_ERROR_FILE"] = str(logs[local].error)
        num_ranks, num_restarts = envs[0]["WORLD_SIZE"], envs[0]["TORCHELASTIC_RESTART_COUNT"]
        assert self._job.on_attempt is not None
        self._job.on_attempt(list(logs.values()), int(num_ranks), int(num_restarts))
        return LogsDest(
            stdouts={local: str(files.stdout) for local, files in logs.items()},
            stderrs={local: str(files.stderr) for local, files in logs.items()},
            error_files={local: str(files.error) for local, files in logs.items()},
        )


def _log_to(path: Path) -> None:
    """Write the agent's log to a file only."""
    handler = logging.FileHandler(path)  # opened now: a script may remove the folder
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("elastic", "launcher", "run"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.addHandler(handler)
        logger.propagate = False
