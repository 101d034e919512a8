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
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.numa.binding import AffinityMode, NumaOptions

from procpipe.launch.run.ranks import Logs

#: Called when an attempt begins, with the files of this host's ranks, the number of ranks of all
#: hosts, and the number of restarts after failures.
OnAttempt = Callable[[Sequence[Logs], int, int], object]


@dataclass(frozen=True)
class Job:
    """What the agent is to run."""

    num_processes: int  # how many on this host
    command: tuple[str, ...]  # what to run in Python: ["train.py", …] or ["-m", "package.train", …]
    run_id: str  # name of the run; the same on all hosts
    num_hosts: tuple[int, int]  # how many hosts there must be, and how many there may be
    endpoint: str  # "host:port" where the hosts meet; "" for one host
    #: Whether the endpoint is on this host; None to find out from its name.
    is_endpoint_host: bool | None
    local_address: str | None  # this host's address for the others; None to find out
    max_restarts: int  # how often the ranks are started again after a failure
    grace_s: int  # how long ranks may take to end after a signal
    numa_binding: str  # torch's own binding to NUMA nodes; "" for none
    folder: Path  # where the logs go


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
    if job.num_hosts[1] > 1:
        # Else a host that comes back never finds the store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        launch_agent(_config(job, on_attempt), sys.executable, ["-u", *job.command])
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


def _config(job: Job, on_attempt: OnAttempt) -> LaunchConfig:
    meeting: dict[str, Any] = {}
    if job.is_endpoint_host is not None:
        meeting["is_host"] = job.is_endpoint_host
    arguments: dict[str, Any] = {
        "min_nodes": job.num_hosts[0],
        "max_nodes": job.num_hosts[1],
        "nproc_per_node": job.num_processes,
        "run_id": job.run_id,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": job.endpoint or "localhost:0",  # a free port
        "rdzv_configs": meeting,
        "max_restarts": job.max_restarts,
        "monitor_interval": 0.1,
        # Without it the agent looks up this host's name, which may take seconds.
        "local_addr": job.local_address if job.endpoint else "127.0.0.1",
        "logs_specs": _LogFolders(job.folder, on_attempt),
        "signals_to_handle": "SIGQUIT",  # the launcher handles the others itself
    }
    if hasattr(LaunchConfig, "shutdown_timeout"):  # not in torch 2.11
        arguments["shutdown_timeout"] = job.grace_s
    if job.numa_binding:
        arguments["numa_options"] = NumaOptions(AffinityMode(job.numa_binding))
    return LaunchConfig(**arguments)


class _LogFolders(LogsSpecs):  # type: ignore[misc, unused-ignore]
    """Gives each rank of each attempt a folder: ``attempt_0/rank_2/stdout.log``."""

    def __init__(self, folder: Path, on_attempt: OnAttempt) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._on_attempt = on_attempt
        self._num_attempts = 0

    @property
    def root_log_dir(self) -> str:
        """Return the run's folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of an attempt that begins; ``envs`` is each rank's environment."""
        attempt = self._folder / f"attempt_{self._num_attempts}"
        self._num_attempts += 1
        logs = {}
        for local, environment in envs.items():
            folder, rank = attempt / f"rank_{environment['RANK']}", int(environment["RANK"])
            folder.mkdir(parents=True)
            files = (folder / name for name in ("stdout.log", "stderr.log", "error.json"))
            logs[local] = Logs(rank, *files)
            environment["TORCHELASTIC_ERROR_FILE"] = str(logs[local].error)
        num_ranks, num_restarts = envs[0]["WORLD_SIZE"], envs[0]["TORCHELASTIC_RESTART_COUNT"]
        self._on_attempt(list(logs.values()), int(num_ranks), int(num_restarts))
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
