"""Starts processes in a folder of their own, reads what they write, and leaves none behind.

    with Job() as job:
        job.write("script.py", CODE)
        run = job.start([*RUN, "-n", 2, "script.py"], num_ranks=2, on_terminal=True)
        run.wait_for("step 3")
        run.press("\\x03")
        code = run.wait_end()

They, and the first ranks of a launcher, are forks of a process that has imported torch
(tests/dist/forks.py), which saves seconds. The terminal is a real pseudo-terminal, which the
process controls: Ctrl-C comes as a signal. All processes, those that they start too, work in the
job's folder, by which they are found: torchrun gives each rank its own session.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.dist.devices import is_on_gpus, visible_to_script
from tests.dist.forks import ROOT, Forked, fork_server
from tests.dist.report import RanksHungError

#: How long a test of a few seconds may take on a machine that is busy with others.
TIMEOUT_S = 90.0

#: How long a process may take to end once it was aborted, and once it was killed.
END_TIMEOUT_S, KILL_TIMEOUT_S = 5.0, 10.0

#: A job must not inherit these from whatever launched the tests. (The last two are of readline,
#: which pytest imports: pytest-xdist's processes have them.)
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("COLUMNS", "LINES"),
)

_POLL_S = 0.02
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


class Ended(NamedTuple):
    """How a run ended."""

    code: int  # the launcher's exit code; negative if a signal ended it
    out: str  # what came to standard output, or on the terminal: without escape sequences
    err: str  # what came to standard error, where that is no terminal
    raw: str  # as ``out``, with escape sequences
    left: tuple[str, ...]  # command lines of the processes that outlived the launcher
    name: str  # of the run's folder of logs
    logs: dict[str, str]  # what is in that folder, by path: "attempt_0/rank_1/stderr.log"


class Process:
    """One command of a job, with all its output and its children's."""

    def __init__(self, job: Job, popen: Any, name: str) -> None:
        self.job = job
        self.popen: Forked = popen  # or a Popen, which has the same methods
        self._logs = {stream: job.path / f"{name}.{stream}" for stream in ("out", "err")}
        self.terminal: int | None = None
        self._reader: threading.Thread | None = None

    def read_from(self, terminal: int) -> None:
        """Collect all that comes on a terminal."""

        def collect() -> None:
            with contextlib.suppress(OSError), self._logs["out"].open("ab", 0) as log:
                while data := os.read(terminal, 1 << 16):
                    log.write(data)
            os.close(terminal)

        self.terminal, self._reader = terminal, threading.Thread(target=collect, daemon=True)
        self._reader.start()

    def raw(self, stream: str = "out") -> str:
        return self._logs[stream].read_bytes().decode(errors="replace")

    def text(self, stream: str = "out") -> str:
        return _ESCAPES.sub("", self.raw(stream)).replace("\r\n", "\n")

    @property
    def output(self) -> str:
        """All that was written so far, standard output and error."""
        return self.raw("out") + self.raw("err")

    def wait_until(self, condition: Callable[[], Any], what: str = "the condition") -> Any:
        """Wait until there is a value, and return it; the process must not end before."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            has_ended = self.popen.poll() is not None
            if found := condition():
                return found
            assert not has_ended, f"it ended before {what}\n{self.output}"
            assert time.monotonic() < deadline_s, f"no {what} in time\n{self.output}"
            time.sleep(_POLL_S)

    def wait_for(self, pattern: str) -> None:
        self.wait_until(lambda: re.search(pattern, self.text()), repr(pattern))

    def press(self, key: str) -> None:
        assert self.terminal is not None
        os.write(self.terminal, key.encode())

    def wait_end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end of the command, and return its exit code.

        Raises:
            RanksHungError: the time limit has passed; holds the output of the job and the stacks of
                all threads of its processes, which are ended.
        """
        try:
            return self.popen.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            raise RanksHungError(
                f"it did not end in time\n{self.job.output_and_stacks()}"
            ) from None

    def wait(self) -> Ended:
        """Wait for the launcher's end."""
        code, left = self.wait_end(), self.job.survivors()
        kill_job(self.job.path)
        if self._reader is not None:
            self._reader.join(TIMEOUT_S)
        root = next(self.job.path.glob("procpipe-logs/*"), self.job.path / "none")
        files = [path for path in root.rglob("*") if path.is_file()]
        logs = {str(path.relative_to(root)): path.read_text() for path in files}
        return Ended(code, self.text(), self.text("err"), self.raw(), tuple(left), root.name, logs)

    def kill_all(self) -> None:
        """Kill the command and all its descendants at once, as if the host lost power."""
        processes = [psutil.Process(self.popen.pid)]
        processes += processes[0].children(recursive=True)
        for process in processes:
            process.suspend()  # so that none sees another end
        for process in processes:
            process.kill()
        self.popen.wait(TIMEOUT_S)


class Job:
    """Commands that belong together, in a folder of their own; all their processes end with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="procpipe-job-")
        self.path = Path(self._folder.name).resolve()
        self._processes: list[Process] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes, and remove the folder."""
        kill_job(self.path)
        for process in self._processes:
            process.popen.wait()
        self._folder.cleanup()

    def write(self, name: str, text: str) -> None:
        """Write a file into the job's folder."""
        (self.path / name).write_text(text)

    def start(
        self,
        argv: Sequence[object],
        address: str = "",
        *,
        num_ranks: int = 0,
        on_terminal: bool = False,
        tears_down: bool = False,
        is_new: bool = False,
        stdin: int | None = None,
        **extra: str,
    ) -> Process:
        """Start what Python runs, as a fork.

        Args:
            argv: the words.
            address: of its host; ranks with different ones use TCP, as on several hosts.
            num_ranks: how many ranks of a launcher are forks, the first ones; at most as many as it
                starts, as it would report those that are left.
            on_terminal: whether both outputs are a terminal of 30 lines of 120 characters.
            tears_down: also free all modules at the end, as Python does; see tests/dist/forks.py.
                Always on GPUs, where libraries have much to free.
            is_new: start a new interpreter, as a user does.
            stdin: a descriptor for its standard input; None for no input.
            extra: environment variables.
        """
        words = [*map(str, argv)]
        own = {"TERM": "xterm", "PYTHONFAULTHANDLER": "1"}
        env = job_environment(own) | visible_to_script() | extra
        if address:
            env["PROCPIPE_ADDRESS"] = address
        name = f"log{len(self._processes)}"
        with (
            open(os.devnull) as nothing,
            (self.path / f"{name}.out").open("a") as out,
            (self.path / f"{name}.err").open("a") as err,
        ):
            files = (nothing.fileno() if stdin is None else stdin, out.fileno(), err.fileno())
            if on_terminal:
                ours, theirs = os.openpty()
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 120, 0, 0))
                files = (files[0], theirs, theirs)
            if is_new:
                popen: Any = subprocess.Popen(
                    [sys.executable, *words], cwd=self.path, env=env, start_new_session=True,
                    stdin=files[0], stdout=files[1], stderr=files[2],
                )  # fmt: skip
            else:
                popen = fork_server().start(
                    words, env=env, cwd=self.path, files=files,
                    tears_down=tears_down or is_on_gpus(),
                    num_ranks=0 if is_on_gpus() else num_ranks,
                )  # fmt: skip
        process = Process(self, popen, name)
        if on_terminal:
            os.close(theirs)
            process.read_from(ours)
        self._processes.append(process)
        return process

    def output_and_stacks(self) -> str:
        """Abort the processes one by one, the launcher last; return what all have written.

        One by one, so that stacks do not mix where processes share a file; all others are stopped
        meanwhile, so that all stacks are of one moment: the end of one does not wake them.
        """
        launchers = [process.popen.pid for process in self._processes]
        alive = sorted(job_of(self.path), key=lambda process: process.pid in launchers)
        for process in alive:
            process.suspend()
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)
                process.send_signal(signal.SIGCONT)
                wait_end(process.pid, END_TIMEOUT_S)
        written = [each.output.rstrip() for each in self._processes]
        return "\n".join(f"--- process {k} has written\n{text}" for k, text in enumerate(written))

    def survivors(self) -> list[str]:
        """Return the command lines of processes that still run."""
        found = []
        for process in job_of(self.path):
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return found


def job_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process under test: this one's without launcher variables."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)
    }
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["OMP_NUM_THREADS"] = "1"
    return environment | (extra or {})


def job_of(folder: Path) -> Iterator[psutil.Process]:
    """Find the other processes that are alive and work in a folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it is ending, or of another user
            is_ours = process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def kill_job(folder: Path) -> None:
    """Kill the processes of a job, and wait for their ends."""
    while processes := list(job_of(folder)):
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
