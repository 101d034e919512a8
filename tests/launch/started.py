"""Starts ``procpipe run`` as a user would, on a terminal or not, and reads its output.

    with started("-n", "2", script=CODE, on_terminal=True) as run:
        run.wait_for("step 3")
        run.press("\\x03")
        ended = run.wait()

The launcher is a fork of a process that has imported torch (tests/dist/forks.py), which saves
seconds. The terminal is a real pseudo-terminal, which the launcher controls: Ctrl-C comes as a
signal. All other processes have a token in their environment; ``wait`` lists those that were alive
when the launcher ended, and all of them end with the ``with`` block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import tempfile
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.dist.devices import is_on_gpus
from tests.dist.forks import Forked, fork_server
from tests.dist.pool import job_environment
from tests.dist.script import KILL_TIMEOUT_S, TOKEN, job_of, kill_job

TIMEOUT_S = 90.0
_POLL_S = 0.02
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: the launcher's exit code; negative if a signal ended it.
        out: what came to standard output, or on the terminal: without escape sequences.
        err: what came to standard error, where that is no terminal.
        raw: as ``out``, with escape sequences.
        left: command lines of the processes that were alive when the launcher had ended.
        name: of the run's folder of logs.
        logs: what is in that folder, by path: "attempt_0/rank_1/stderr.log".
    """

    code: int
    out: str
    err: str
    raw: str
    left: tuple[str, ...]
    name: str
    logs: dict[str, str]

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- out\n{self.out}\n--- err\n{self.err}\n--- {self.left}"


class Started:
    """A run under way."""

    def __init__(self, process: Forked, token: str, folder: Path) -> None:
        self.process = process
        self.token = token
        self.folder = folder
        self.terminal: int | None = None
        self.texts = {"out": b"", "err": b""}
        self.readers: list[threading.Thread] = []

    def read_from(self, name: str, descriptor: int) -> None:
        """Collect all output from a descriptor."""

        def collect() -> None:
            with contextlib.suppress(OSError):  # the end of a terminal
                while data := os.read(descriptor, 1 << 16):
                    self.texts[name] += data
            os.close(descriptor)

        self.readers.append(threading.Thread(target=collect, daemon=True))
        self.readers[-1].start()

    def text(self, name: str = "out") -> str:
        return _ESCAPES.sub("", self.raw(name)).replace("\r\n", "\n")

    def raw(self, name: str = "out") -> str:
        return self.texts[name].decode(errors="replace")

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until there is a value, and return it."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            has_ended = self.process.poll() is not None
            found = condition()
            if found:
                return found
            assert not has_ended, f"the run ended before {what}\n{self}"
            assert time.monotonic() < deadline_s, f"no {what} in time\n{self}"
            time.sleep(_POLL_S)

    def wait_for(self, text: str, name: str = "out") -> None:
        self.wait_until(lambda: text in self.text(name), repr(text))

    def wait_to_match(self, pattern: str) -> None:
        self.wait_until(lambda: re.search(pattern, self.text()), repr(pattern))

    def processes(self) -> list[psutil.Process]:
        return list(job_of(self.token))

    def rank(self, number: int) -> psutil.Process:
        """Find the process of a rank."""

        def find() -> list[psutil.Process]:
            found = []
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    is_rank = process.environ().get("RANK") == str(number)
                    if is_rank and process.ppid() == self.process.pid:
                        found.append(process)
            return found

        return self.wait_until(find, f"process of rank {number}")[0]

    def press(self, key: str) -> None:
        assert self.terminal is not None
        os.write(self.terminal, key.encode())

    def wait(self, end_timeout_s: float = 0.0) -> Ended:
        """Wait for the launcher's end, and then a while for all other processes."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end in time\n{self}") from None
        deadline_s = time.monotonic() + end_timeout_s
        while self.processes() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        left = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                left.append(" ".join(process.cmdline()))
        self.end_all()
        for reader in self.readers:
            reader.join(TIMEOUT_S)
        root = next(self.folder.glob("procpipe-logs/*"), self.folder / "none")
        files = [path for path in root.rglob("*") if path.is_file()]
        logs = {str(path.relative_to(root)): path.read_text() for path in files}
        texts = self.text("out"), self.text("err"), self.raw("out")
        return Ended(code, *texts, tuple(left), root.name, logs)

    def end_all(self) -> None:
        kill_job(self.token)

    def __str__(self) -> str:
        return f"--- out\n{self.text('out')}\n--- err\n{self.text('err')}"


@contextlib.contextmanager
def started(
    *options: str,
    script: tuple[str, ...],
    on_terminal: bool = False,
    grace_s: int | None = None,
    num_forked: int = 0,
) -> Iterator[Started]:
    """Start ``procpipe run <options> script.py <args>`` in an empty folder.

    Args:
        options: of ``procpipe run``.
        script: the code of the script, and its arguments.
        on_terminal: whether both outputs are a terminal of 30 lines of 120 characters.
        grace_s: how long ranks may take to end after SIGTERM.
        num_forked: how many ranks are forks, the first ones; at most as many as the run starts, as
            it would report those that are left.
    """
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="procpipe-launch-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(script[0])
        argv = ["-m", "procpipe.launch", "run", *options, "script.py", *script[1:]]
        environment = job_environment({TOKEN: token, "TERM": "xterm"})
        if grace_s is not None:
            environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_s)
        if on_terminal:
            ours, theirs = os.openpty()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 120, 0, 0))
            outputs = {"out": ours}
            streams = (theirs, theirs)
        else:
            out, out_end = os.pipe()
            err, err_end = os.pipe()
            outputs = {"out": out, "err": err}
            streams = (out_end, err_end)
        num_ranks = 0 if is_on_gpus() else num_forked
        with open(os.devnull) as stdin:
            files = (stdin.fileno(), *streams)
            process = fork_server().start(
                argv, env=environment, cwd=folder, files=files, num_ranks=num_ranks
            )
        for descriptor in set(streams):
            os.close(descriptor)
        run = Started(process, token, folder)
        run.terminal = outputs["out"] if on_terminal else None
        for name, descriptor in outputs.items():
            run.read_from(name, descriptor)
        try:
            yield run
        finally:
            run.end_all()
            process.kill()
            process.wait(KILL_TIMEOUT_S)
