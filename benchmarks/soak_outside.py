"""What happens to a job of the soak test from outside: signals and unknown connections.

Polls a running job, and injects the fault when its time has come:

    stop                continues a stopped rank once the others have reported the stall
    kill at any time    kills a rank some moments after it has begun
    kill the launcher   kills it some moments after a rank has begun
    strangers           connect to the job's ports and sockets, and send garbage
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import socket
import struct
import time
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.soak_rounds import Round

#: At most so many strangers are connected at the same time.
_MAX_STRANGERS = 40


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self._path}'",)


class Outsider:
    """Acts on one job.

    Args:
        round_: its round.
        folder: where its ranks write their process ids and logs.
        launcher_pid: the process that started them.

    Attributes:
        num_acts: how often it has acted.
    """

    def __init__(self, round_: Round, folder: Path, launcher_pid: int) -> None:
        self._round = round_
        self._folder = folder
        self._launcher_pid = launcher_pid
        self._chance = random.Random(round_.seed)
        self._strike_s: float | None = None
        self._strangers: list[socket.socket] = []
        self._visited: set[object] = set()
        self.num_acts = 0

    def __enter__(self) -> Outsider:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stranger in self._strangers:
            stranger.close()

    def poll(self) -> None:
        """Make the fault happen if it is due."""
        act = self._round.act
        if act == "stop":
            self._continue_stopped()
        elif act == "kill at any time":
            self._kill_when_due(self._pid(self._round.origin))
        elif act == "kill the launcher":
            if self._pid(self._round.origin):
                self._kill_when_due(self._launcher_pid)
        elif act == "strangers":
            self._connect()

    def _pid(self, rank: int) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / f"pid.{rank}").read_text())
        return None

    def _continue_stopped(self) -> None:
        pid = self._pid(self._round.origin)
        if pid is None:
            return
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                logs = self._folder.glob("logs/**/*.log")
                if any(f"process {pid} is stopped" in log.read_text() for log in logs):
                    os.kill(pid, signal.SIGCONT)
                    self.num_acts += 1

    def _kill_when_due(self, pid: int | None) -> None:
        if pid is None:
            return
        if self._strike_s is None:
            self._strike_s = time.monotonic() + self._round.moment
        elif time.monotonic() > self._strike_s:
            self._strike_s = float("inf")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.num_acts += 1

    # -- strangers ------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to all sockets on which a process of the job listens, and send garbage."""
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self._launcher_pid)
            for process in (launcher, *launcher.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    for family, address in _listening(process):
                        self._send_garbage(family, address)

    def _send_garbage(self, family: int, address: object) -> None:
        if len(self._strangers) == _MAX_STRANGERS:
            self._strangers.pop(0).close()
        stranger = socket.socket(family, socket.SOCK_STREAM)
        self._strangers.append(stranger)
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.connect(address)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            stranger.send(self._garbage())
            self.num_acts += 1
        if address in self._visited:
            stranger.close()  # one stranger stays connected to each, and sends nothing more
        self._visited.add(address)

    def _garbage(self) -> bytes:
        chance = self._chance
        hello = struct.pack("!9sI32s", b"procpipe2", chance.randrange(4), chance.randbytes(32))
        return chance.choice(
            [
                b"",
                b"\0",
                chance.randbytes(chance.choice([8, 1000, 1 << 16])),
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                pickle.dumps(Bomb(self._folder / "tmp" / "unpickled")),
                hello[: chance.randrange(len(hello))],
                hello,
                hello + chance.randbytes(32),
            ]
        )


def _listening(process: psutil.Process) -> list[tuple[int, object]]:
    """Return where a process listens, abstract unix sockets included."""
    found: list[tuple[int, object]] = [
        (connection.family, (connection.laddr.ip, connection.laddr.port))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    inodes = set()
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{process.pid}/fd/{name}")
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        is_listening = fields[5] == "01" and fields[3] == "00010000"
        if is_listening and fields[6] in inodes and len(fields) > 7 and fields[7][0] == "@":
            found.append((socket.AF_UNIX, "\0" + fields[7][1:]))
    return found
