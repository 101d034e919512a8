"""Several hosts for tests: network namespaces joined by a cable, or addresses of the loopback.

    with network_namespaces(2) as (a, b):           # skips where they cannot be made
    with loopback_addresses(2) as (a, b):           # always there; ranks use TCP too
        with Job() as job:
            agents = [job.start_torchrun(host, ["--nnodes=2", ...], num_ranks=1) for host in (a, b)]
            agents[0].wait_end()

Torchrun and the first of its ranks are forks (tests/dist/launchers.py), which saves seconds.
All processes end with the ``Job``, all namespaces with the ``with``. If the tests are killed, the
kernel ends torchrun and the commands, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from tests.dist.forks import Forked, end_with_parent, fork_server
from tests.dist.pool import job_environment
from tests.dist.script import TOKEN, job_of, kill_job

TORCHRUN = ("-m", "torch.distributed.run")

#: How long a test of a few seconds may take on a machine that is busy with others.
TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Host:
    """A place to start processes at.

    Attributes:
        address: its address for the other hosts.
        network: the name of its network namespace; "" for that of this process.
        environment: variables that its processes need.
    """

    address: str
    network: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def loopback_addresses(num_hosts: int) -> Iterator[list[Host]]:
    """Yield addresses of this host; ranks with different addresses use TCP, as on several hosts."""
    addresses = [f"127.0.0.{number}" for number in range(2, 2 + num_hosts)]
    yield [Host(address, "", {"PROCPIPE_ADDRESS": address}) for address in addresses]


@contextlib.contextmanager
def network_namespaces(num_hosts: int) -> Iterator[list[Host]]:
    """Make hosts whose only network is one cable each to a common switch."""
    prefix = f"pp{os.getpid()}"
    switch, names = f"{prefix}s", [f"{prefix}n{number}" for number in range(num_hosts)]
    hosts = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            address, port = f"10.231.77.{number + 1}", f"port{number}"
            _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "cable", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            hosts.append(Host(address, name))
    except (OSError, subprocess.CalledProcessError) as error:
        _remove([*names, switch])
        reason = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"network namespaces cannot be made here: {reason.strip()}")
    try:
        yield hosts
    finally:
        _remove([*names, switch])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _ip("netns", "delete", name)


class Process:
    """One command on a host, with all its output and its children's."""

    def __init__(
        self, popen: subprocess.Popen[bytes] | Forked, argv: Sequence[str], log: Path
    ) -> None:
        self.popen = popen
        self.argv = argv
        self._log = log

    @property
    def output(self) -> str:
        """All that was written so far, standard output and error."""
        return self._log.read_text(errors="replace")

    def wait_output(self, *words: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all words were written."""
        wait_until(
            lambda: all(word in self.output for word in words) or self.popen.poll() is not None,
            timeout_s,
        )
        for word in words:
            assert word in self.output, f"{word!r} is missing in\n{self.output}"

    def wait_end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end of the command, and return its exit code."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {timeout_s} s:\n{self.output}") from None

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
    """Commands that belong together; all their processes end with it."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex
        self._processes: list[Process] = []

    def __enter__(self) -> Job:
        self._folder = tempfile.TemporaryDirectory(prefix="procpipe-hosts-")
        self.path = Path(self._folder.name)
        return self

    def __exit__(self, *_: object) -> None:
        kill_job(self._token)
        for process in self._processes:
            process.popen.wait()
        self._folder.cleanup()

    def write(self, name: str, text: str) -> Path:
        """Write a file into the job's folder."""
        path = self.path / name
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, host: Host, argv: Sequence[object], **environment: str) -> Process:
        """Start a command on a host that is no network namespace."""
        assert not host.network
        words = [*map(str, argv)]
        env = self._environment(host, environment)
        with self._log() as file, open(os.devnull) as stdin:
            popen = subprocess.Popen(
                words, cwd=self.path, env=env, stdin=stdin, stdout=file, stderr=file,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one call of C
            )  # fmt: skip
        return self._add(popen, words)

    def start_torchrun(self, host: Host, argv: Sequence[str], num_ranks: int) -> Process:
        """Start torchrun on a host; its first ``num_ranks`` ranks are forks."""
        env = self._environment(host, {})
        with self._log() as file, open(os.devnull) as stdin:
            popen = fork_server().start(
                [*TORCHRUN, *argv],
                env=env,
                cwd=self.path,
                files=(stdin.fileno(), file.fileno(), file.fileno()),
                num_ranks=num_ranks,
                network=host.network,
            )
        return self._add(popen, argv)

    def _environment(self, host: Host, extra: Mapping[str, str]) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        variables = base | job_environment() | {"TORCH_CPP_LOG_LEVEL": "ERROR", TOKEN: self._token}
        return variables | dict(host.environment) | dict(extra)

    def _log(self) -> BinaryIO:
        return (self.path / f"log{len(self._processes)}").open("wb")

    def _add(self, popen: subprocess.Popen[bytes] | Forked, argv: Sequence[str]) -> Process:
        self._processes.append(Process(popen, argv, self.path / f"log{len(self._processes)}"))
        return self._processes[-1]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition is true; a timeout's error has all output."""
        try:
            wait_until(condition)
        except AssertionError as error:
            texts = "\n".join(f"--- {p.argv!r}\n{p.output}" for p in self._processes)
            raise AssertionError(f"{error}\n{texts}") from None

    def survivors(self) -> list[str]:
        """Return the command lines of processes that still run."""
        return [" ".join(process.cmdline()) for process in job_of(self._token)]


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the condition is true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true in {timeout_s} s"
        time.sleep(0.02)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
