"""Runs a whole script, without a launcher or under torchrun, as a user would.

    done = run_forked(ROOT / "examples/train_digits.py", num_ranks=2, args=["--epochs", "1"])
    done.check()

    done = run_by_torchrun(ROOT / "examples/train_digits.py", num_ranks=2)

The processes of both have imported torch before (tests/dist/forks.py), except for the ranks of
torchrun on GPUs.

The processes of a job are found by a token in their environment, since torchrun gives each rank
its own session (and so its own process group). None outlives the call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from tests.dist.devices import is_on_gpus, visible_to_script
from tests.dist.forks import Forked, fork_server
from tests.dist.pool import job_environment
from tests.dist.report import RanksFailedError, RanksHungError

TOKEN = "PROCPIPE_TEST_JOB"

#: Each job gets its own port; the host's name is not looked up.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")

#: How long a process may take to end once it was aborted.
END_TIMEOUT_S = 5.0

#: How long the kernel may take to end a killed process.
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Completed:
    """How a script ended.

    Attributes:
        stdout: all that its processes wrote there; stderr likewise.
        returncode: of the first process; negative if a signal ended it.
        duration_s: from the start of the first process to its end.
    """

    stdout: str
    stderr: str
    returncode: int
    duration_s: float

    def check(self) -> Completed:
        """Return itself; raise if the script failed."""
        if self.returncode != 0:
            raise RanksFailedError(f"the script did not end well\n{self}")
        return self

    def __str__(self) -> str:
        return (
            f"exit code {self.returncode} after {self.duration_s:.1f} s\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def run_forked(
    path_or_code: Path | str,
    *,
    num_ranks: int | None = None,
    args: Sequence[str] = (),
    timeout_s: float = 90.0,
    tears_down: bool = False,
) -> Completed:
    """Run a script to its end, in an empty working directory that is removed afterwards.

    Args:
        path_or_code: a ``Path`` to a script, or a script's code as a ``str``.
        num_ranks: how many processes, with the environment variables that a launcher would set;
            ``None`` for one process without a launcher.
        args: the script's arguments.
        timeout_s: hard limit.
        tears_down: also free all modules at the end, as Python does; see tests/dist/forks.py.
            Always on GPUs, where libraries have much to free.

    Raises:
        RanksHungError: the time limit has passed; holds the output and the stacks of all threads
            of every Python process. All processes are killed.
    """
    tears_down = tears_down or is_on_gpus()
    with _script_in_a_folder(path_or_code) as (script, folder):
        argv, environments = [script, *args], environments_of(num_ranks)
        return _run(argv, environments, folder, timeout_s, tears_down=tears_down)


def run_by_torchrun(path_or_code: Path | str, *, num_ranks: int) -> Completed:
    """Run a script under torchrun; else as :func:`run_forked` does."""
    with _script_in_a_folder(path_or_code) as (script, folder):
        argv = [*TORCHRUN, f"--nproc-per-node={num_ranks}", script]
        num_forked = 0 if is_on_gpus() else num_ranks
        return _run(argv, [{}], folder, 90.0, tears_down=True, num_ranks=num_forked)


def environments_of(num_ranks: int | None) -> list[dict[str, str]]:
    """Return what a launcher would add to the environment of each process."""
    if num_ranks is None:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks = map(str, range(num_ranks))
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


@contextlib.contextmanager
def _script_in_a_folder(path_or_code: Path | str) -> Iterator[tuple[str, Path]]:
    """Yield a script's path, and a folder that has an empty one, ``cwd``, to run it in."""
    with tempfile.TemporaryDirectory(prefix="procpipe-script-") as name:
        folder = Path(name)
        script = path_or_code
        if isinstance(script, str):
            code, script = script, folder / "script.py"
            script.write_text(textwrap.dedent(code))
        (folder / "cwd").mkdir()
        yield str(script.resolve()), folder


def _run(
    argv: list[str],
    environments: list[dict[str, str]],
    folder: Path,
    timeout_s: float,
    *,
    tears_down: bool,
    num_ranks: int = 0,
) -> Completed:
    """Run a process for each environment."""
    token = uuid.uuid4().hex
    common = job_environment({"PYTHONFAULTHANDLER": "1", TOKEN: token}) | visible_to_script()
    cwd, out, err = folder / "cwd", folder / "stdout", folder / "stderr"
    start = time.monotonic()
    processes: list[Forked] = []
    # Files, not pipes: a leftover process would keep a pipe open.
    with open(os.devnull) as stdin, out.open("ab") as stdout, err.open("ab") as stderr:
        files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
        for environment in environments:
            env = common | environment
            process = fork_server().start(
                argv, env=env, cwd=cwd, files=files, tears_down=tears_down, num_ranks=num_ranks
            )
            processes.append(process)
    try:
        codes = [
            process.wait(max(0.0, start + timeout_s - time.monotonic())) for process in processes
        ]
        duration_s = time.monotonic() - start
    except subprocess.TimeoutExpired:
        texts = out.read_text(errors="replace"), err.read_text(errors="replace")
        stacks = _stacks(token, processes[0].pid, err)
        raise RanksHungError(
            f"{' '.join(argv)} did not end in {timeout_s} s\n"
            f"--- stdout\n{texts[0]}\n--- stderr\n{texts[1]}\n{stacks}"
        ) from None
    finally:
        kill_job(token)
        for process in processes:
            process.wait(KILL_TIMEOUT_S)
    code = next((code for code in codes if code != 0), 0)
    texts = out.read_text(errors="replace"), err.read_text(errors="replace")
    return Completed(*texts, code, duration_s)


def _stacks(token: str, launcher_pid: int, err: Path) -> str:
    """Abort the processes of a job one by one, the launcher last; return their stacks.

    One by one, so that stacks do not mix in the common stderr; all others are stopped meanwhile,
    so that the end of one does not wake them.
    """
    reports = []
    processes = sorted(job_of(token), key=lambda process: process.pid == launcher_pid)
    for process in processes:
        process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank = process.environ().get("RANK")
            name = f"rank {rank}" if rank is not None else " ".join(process.cmdline())
            written = err.stat().st_size
            process.send_signal(signal.SIGABRT)
            process.send_signal(signal.SIGCONT)
            wait_end(process.pid, END_TIMEOUT_S)
            text = err.read_bytes()[written:].decode(errors="replace")
            reports.append(f"--- {name} (process {process.pid}) is still at\n{text}")
    return "\n".join(reports)


def job_of(token: str) -> Iterator[psutil.Process]:
    """Find the processes that are alive with a token in their environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it is ending, or of another user
            is_ours = process.environ().get(TOKEN) == token
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def kill_job(token: str) -> None:
    """Kill the processes of a job, and wait for their ends."""
    while processes := list(job_of(token)):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in processes:
            wait_end(process.pid, KILL_TIMEOUT_S)


def wait_end(pid: int, timeout_s: float) -> bool:
    """Wait for the end of any process; return whether it has ended or is a zombie."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(wait([fd], max(0.0, timeout_s)))
    finally:
        os.close(fd)
