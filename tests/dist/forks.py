"""Starts Python processes that have already imported torch: in milliseconds, not in seconds.

    process = fork_server().start([script, "--epochs", "1"], env=..., cwd=..., files=(0, 1, 2))
    code = process.wait(timeout_s=60)

    parent                             fork server                      child
      Start, three descriptors --->      has imported torch;
                                         forks ------------------->     runs as ``python <argv>``
                               <---      process id
      waits for the end
      process id               --->      waitpid
                               <---      exit code
      names of modules         --->      imports them, for all later children

All processes of a test run share a server. pytest-xdist's are its children, too: collecting tests
takes them a second, and not ten. With this file as its script, Python hands its arguments to the
server, and waits for the end of the child.

A child has its own environment, working folder, session and main module; only imports have run in
it. A terminal as its output controls it. The server has one thread, because only the thread that
forks exists in the child. A test of what a fresh interpreter imports cannot use such a process, nor
one that reads its arguments or variables in /proc. The process ends after its last exit function:
freeing all imported modules would take ten times as long as everything else. With ``tears_down`` it
frees them too (tests/dist/forked_child.py). With ``num_ranks`` the ranks that it starts as a
launcher are forks as well (tests/dist/launchers.py). This file does not know what the processes do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, and not between fork and exec

#: What takes long to import, for tests of Hugging Face: ``fork_server().load(*OF_HF)``.
OF_HF = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
)

#: What takes long to import. The first optimizer of a process imports the second; launchers import
#: the third; all files of tests import the fifth, and most the last.
IMPORTS = (
    *("torch.distributed", "torch._dynamo", "torch.distributed.launcher.api"),
    *("procpipe.state", "pytest", "hypothesis", "tests.dist.stages"),
)

#: What takes examples long to import; it may not be installed.
OF_EXAMPLES = "sklearn.datasets", "matplotlib.figure", "matplotlib.backends.backend_agg"

#: Has the path of the socket of the server that this process shares.
SOCKET = "PROCPIPE_TESTS_FORK_SERVER"

_MAX_MESSAGE_BYTES = 1 << 17


@dataclass(frozen=True)
class Start:
    """The request for a child.

    Attributes:
        argv: as after ``python``: a script, ``-c`` and code, or ``-m`` and a module; and arguments.
        env: the whole environment.
        cwd: the working folder.
        tears_down: end as Python does, which frees all modules and their objects.
        num_ranks: how many ranks of torch's agent, which this child runs, are forks as well.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    tears_down: bool = False
    num_ranks: int = 0


def code_of(pid: int) -> int:
    """Wait for the end of a child of this process; return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Forked:
    """A child of a process, with the methods of ``subprocess.Popen`` that tests need.

    ``code_of`` has that process wait for its end, and returns the exit code.
    """

    def __init__(self, pid: int, code_of: Callable[[int], int] = code_of) -> None:
        self.pid = pid
        self._code_of = code_of
        # The process id is not reused until the parent has waited for the child.
        self._pidfd: int | None = os.pidfd_open(pid)
        self._code: int | None = None

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the process has ended; gone after :meth:`wait`."""
        assert self._pidfd is not None, "the process was waited for"
        return self._pidfd

    def send_signal(self, number: int) -> None:
        """Send a signal, unless :meth:`wait` has returned."""
        if self._code is None:
            os.kill(self.pid, number)

    @property
    def returncode(self) -> int | None:
        """What :meth:`wait` has returned, or ``None``."""
        return self._code

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless :meth:`wait` has returned."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process, unless :meth:`wait` has returned."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while the process runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """
        if self._code is None:
            assert self._pidfd is not None
            if not wait([self._pidfd], timeout_s):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
            os.close(self._pidfd)
            self._pidfd = None
            self._code = self._code_of(self.pid)
        return self._code


class ForkServer:
    """A connection to the server, for any thread; the server ends with its last connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        if SOCKET not in os.environ:
            self._start_server()
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.connect(os.environ[SOCKET])

    def _start_server(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="procpipe-forks-")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{self._folder.name}/socket")
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.dist.forks", str(listener.fileno())],
                cwd=ROOT,
                # Torch reads this when imported; with more than 1 it would start threads.
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        os.environ[SOCKET] = f"{self._folder.name}/socket"

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        files: tuple[int, int, int],
        tears_down: bool = False,
        num_ranks: int = 0,
    ) -> Forked:
        """Start a process; the files are its standard input, output and error."""
        start = Start(tuple(argv), dict(env), str(cwd), tears_down, num_ranks)
        with self._lock:
            with contextlib.suppress(ConnectionError):  # then _answer() raises
                send_start(self._requests, start, files)
            pid = self._answer()
        return Forked(pid, self._code_of_child)

    def load(self, *names: str) -> None:
        """Import modules in the server, so that later children have them; what there is of them."""
        with self._lock:
            self._requests.send(pickle.dumps(names))
            self._answer()

    def _code_of_child(self, pid: int) -> int:
        with self._lock:
            self._requests.send(pickle.dumps(pid))
            return self._answer()

    def close(self) -> None:
        """End the connection, and a server that was started here with all of its children."""
        self._requests.close()
        if self._process is not None:
            del os.environ[SOCKET]
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()

    def _answer(self) -> int:
        message = b""
        with contextlib.suppress(ConnectionError):
            message = self._requests.recv(_MAX_MESSAGE_BYTES)
        if not message:
            raise RuntimeError("the fork server has ended")
        return int(pickle.loads(message))


@functools.cache
def fork_server() -> ForkServer:
    """Return this process's only connection; the first process of a run starts the server."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def send_start(requests: socket.socket, start: Start, files: Sequence[int]) -> None:
    """Send a request, with what are to be standard input, output and error."""
    message = pickle.dumps(start)
    assert len(message) < _MAX_MESSAGE_BYTES
    socket.send_fds(requests, [message], list(files))


def receive(requests: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a request and its files; None if there will be none."""
    message, descriptors, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 3)
    return (pickle.loads(message) if message else None), descriptors


def find_launch() -> None:
    """Make procpipe.launch importable if procpipe is not installed: it is the folder launch/."""
    import procpipe

    if importlib.util.find_spec("procpipe.launch") is None:
        procpipe.__path__.append(str(ROOT))


def _serve(listener: socket.socket) -> tuple[Start, list[int]]:
    """Answer requests until the last connection ends; in each child, return its request."""
    connections: list[socket.socket] = []
    while True:
        for ready in wait([listener, *connections]):
            assert isinstance(ready, socket.socket)
            if ready is listener:
                connections.append(listener.accept()[0])
                continue
            request, descriptors = receive(ready)
            if request is None:
                connections.remove(ready)
                ready.close()
                if not connections:
                    os._exit(0)
            elif isinstance(request, int):
                _answer(ready, code_of(request))
            elif isinstance(request, tuple):
                _load(request)
                _answer(ready, 0)
            else:
                pid = os.fork()
                if pid == 0:
                    # The kernel kills this process when the one that started it ends.
                    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                    for each in (listener, *connections):
                        each.close()
                    return request, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                _answer(ready, pid)


def _answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # it has ended meanwhile
        connection.send(pickle.dumps(number))


def _load(names: Sequence[str]) -> None:
    """Import modules."""
    # Frozen objects outlive the interpreter. Triton's nanobind would report its objects as leaks
    # when a child ends, so Triton is not imported here; torch works without it. Nor is PyArrow,
    # which starts a thread (24.0; scikit-learn imports it where pandas is installed).
    absent: dict[str, Any] = {"triton": None, "pyarrow": None}
    sys.modules.update(absent)
    gc.disable()  # it would read all modules again and again
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    for name in absent:
        del sys.modules[name]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a child would have only one"
    gc.collect()
    gc.freeze()  # so that no child writes to shared pages, which would copy them
    gc.enable()


def _hand_over(argv: Sequence[str]) -> int:
    """Let the server run what Python was to run, ``-u`` apart; return the exit code."""
    process = fork_server().start(
        [*argv[argv[0] == "-u" :]], env=os.environ, cwd=Path.cwd(), files=(0, 1, 2)
    )
    return process.wait()


if __name__ == "__main__" and not sys.argv[1].isdecimal():
    sys.exit(_hand_over(sys.argv[1:]))

if __name__ == "__main__":
    from tests.dist.forked_child import End, become

    end = End()
    _load(IMPORTS)
    find_launch()
    from tests.dist.launchers import fork_ranks, name_methods_fast

    name_methods_fast()
    start, descriptors = _serve(socket.socket(fileno=int(sys.argv[1])))
    if start.num_ranks:
        start, descriptors = fork_ranks(start, descriptors)
    end.run(*become(start, descriptors), tears_down=start.tears_down)
