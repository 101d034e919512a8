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

A child has its own environment, working folder, session and main module; only imports have run in
it. A terminal as its output controls it. The server has one thread, because only the thread that
forks exists in the child. A test of what a fresh interpreter imports cannot use such a process, nor
one that reads its arguments or environment in /proc. The process ends after its last exit function:
freeing all imported modules would take ten times as long as everything else. With ``tears_down`` it
frees them too. This file does not know what the processes do.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import gc
import importlib
import importlib.util
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import termios
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

#: What takes long to import, for tests of Hugging Face: ``fork_server().load(*OF_HF)``.
OF_HF = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
)

#: What takes long to import. The first optimizer of a process imports the second; launchers import
#: the third; all files of tests import the fifth; some examples import the last, which may not be
#: installed.
IMPORTS = (
    *("torch.distributed", "torch._dynamo", "torch.distributed.launcher.api", "procpipe.state"),
    *("pytest", "sklearn.datasets"),
)

_MAX_MESSAGE_BYTES = 1 << 17


@dataclass(frozen=True)
class Start:
    """The request for a child.

    Attributes:
        argv: as after ``python``: a script, ``-c`` and code, or ``-m`` and a module; and arguments.
        env: the whole environment.
        cwd: the working folder.
        tears_down: end as Python does, which frees all modules and their objects.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    tears_down: bool


class Forked:
    """A child of the server, with the methods of ``subprocess.Popen`` that tests need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        # The process id is not reused until the server has waited for the child.
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
            self._code = self._server.code_of(self.pid)
        return self._code


class ForkServer:
    """The parent's view of the server, for any thread; the server ends when the parent ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", "tests.dist.forks", str(child_end.fileno())]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with child_end:
            self._process = subprocess.Popen(
                argv,
                cwd=ROOT,
                # Torch reads this when imported; with more than 1 it would start threads.
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        files: tuple[int, int, int],
        tears_down: bool = False,
    ) -> Forked:
        """Start a process; the files are its standard input, output and error."""
        message = pickle.dumps(Start(tuple(argv), dict(env), str(cwd), tears_down))
        assert len(message) < _MAX_MESSAGE_BYTES
        with self._lock:
            with contextlib.suppress(ConnectionError):  # then _answer() raises
                socket.send_fds(self._requests, [message], list(files))
            pid = self._answer()
        return Forked(self, pid)

    def load(self, *names: str) -> None:
        """Import modules in the server, so that later children have them; what there is of them."""
        with self._lock:
            self._requests.send(pickle.dumps(names))
            self._answer()

    def code_of(self, pid: int) -> int:
        """Wait for the end of a child; return its exit code."""
        with self._lock:
            self._requests.send(pickle.dumps(pid))
            return self._answer()

    def copy(self) -> socket.socket:
        """Fork the server itself; return a socket to the copy, for :meth:`use`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            socket.send_fds(self._requests, [pickle.dumps(None)], [theirs.fileno()])
            self._answer()
        return ours

    def use(self, requests: socket.socket) -> None:
        """Use a copy of the server from now on, in a fork of this process."""
        self._requests.close()
        self._requests = requests

    def close(self) -> None:
        """End the server; its children keep running."""
        self._requests.close()
        self._process.wait()

    def _answer(self) -> int:
        message = b""
        with contextlib.suppress(ConnectionError):
            message = self._requests.recv(_MAX_MESSAGE_BYTES)
        if not message:
            raise RuntimeError(f"the fork server has ended, exit code {self._process.wait()}")
        return int(pickle.loads(message))


@functools.cache
def fork_server() -> ForkServer:
    """Return this process's only server; start it at the first call."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def find_launch() -> None:
    """Make procpipe.launch importable if procpipe is not installed: it is the folder launch/."""
    import procpipe

    if importlib.util.find_spec("procpipe.launch") is None:
        procpipe.__path__.append(str(ROOT))


def _serve(requests: socket.socket) -> tuple[Start, list[int]]:
    """Answer requests until there are no more; in each child, return its request and files."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        request = pickle.loads(message)
        if isinstance(request, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        elif isinstance(request, tuple):
            _load(request)
            answer = 0
        elif request is None:
            [descriptor] = descriptors
            answer = os.fork()
            if answer == 0:
                requests.close()
                requests = socket.socket(fileno=descriptor)
                continue
            os.close(descriptor)
        else:
            answer = os.fork()
            if answer == 0:
                requests.close()
                return request, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
        requests.send(pickle.dumps(answer))


def _load(names: Sequence[str]) -> None:
    """Import modules."""
    # Frozen objects outlive the interpreter. Triton's nanobind would report its objects as leaks
    # when a child ends, so Triton is not imported here; torch works without it.
    sys.modules["triton"] = None  # type: ignore[assignment]
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    del sys.modules["triton"]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a child would have only one"
    gc.collect()
    gc.freeze()  # so that no child writes to shared pages, which would copy them


def _become(start: Start, descriptors: list[int]) -> tuple[types.CodeType, dict[str, Any]]:
    """Set this child up like a new interpreter; return its main code and its globals."""
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if os.isatty(1):
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.env)
    _open_standard_files()
    if "PYTHONFAULTHANDLER" in start.env:
        faulthandler.enable()
    main = types.ModuleType("__main__")
    if start.argv[0] in ("-c", "-m"):
        sys.argv = ["-c", *start.argv[2:]]
        sys.path[0] = ""
        text = start.argv[1]
        if start.argv[0] == "-m":
            text = f"import runpy; runpy.run_module({text!r}, run_name='__main__', alter_sys=True)"
        code = compile(text, "<string>", "exec")
    else:
        sys.argv = [*start.argv]
        sys.path[0] = str(Path(start.argv[0]).parent)
        main.__file__ = start.argv[0]
        code = compile(Path(start.argv[0]).read_bytes(), start.argv[0], "exec")
    sys.modules["__main__"] = main
    return code, vars(main)


def _open_standard_files() -> None:
    """Open what ``sys`` has anew: as the server opened it, it remembers other files."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    streams = {
        "stdin": os.fdopen(0, closefd=False),
        "stdout": io.TextIOWrapper(
            os.fdopen(1, "wb", 0 if is_unbuffered else -1, closefd=False),
            line_buffering=os.isatty(1),
            write_through=is_unbuffered,
        ),
        "stderr": os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False),
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class End:
    """The last exit function of a child: ends the process before the modules are freed."""

    def __init__(self) -> None:
        self._code: int | None = None
        # Exit functions run in reverse order.
        atexit.register(self._end_now)

    def run(self, code: types.CodeType, names: dict[str, Any], *, tears_down: bool) -> None:
        """Run a main module, and store the exit code of its process."""
        try:
            exec(code, names)
            ending = 0
        except SystemExit as end:
            ending = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except KeyboardInterrupt:
            tears_down = True  # Python then ends by that signal
            raise
        except BaseException:
            ending = 1
            raise
        finally:
            self._code = None if tears_down else ending

    def _end_now(self) -> None:
        if self._code is not None:
            for file in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    file.flush()
            os._exit(self._code & 0xFF)


if __name__ == "__main__":
    end = End()
    _load(IMPORTS)
    find_launch()
    start, descriptors = _serve(socket.socket(fileno=int(sys.argv[1])))
    end.run(*_become(start, descriptors), tears_down=start.tears_down)
