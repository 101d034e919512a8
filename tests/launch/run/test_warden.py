"""Ending all processes of a run, by the token in their environment, and the warden that does it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from procpipe.launch.run import warden
from procpipe.launch.run.warden import TOKEN, end_family, family

pytestmark = pytest.mark.dist

#: Starts a child without environment in its session, a second one in its own session, and waits.
TREE = """
import subprocess, sys
stripped = subprocess.Popen(["sleep", "1000"], env={})
apart = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
print(stripped.pid, apart.pid, flush=True)
stripped.wait()
"""

TIMEOUT_S = 30.0


@pytest.fixture
def token():
    token = uuid.uuid4().hex
    yield token
    end_family(token)


def start(token, code, **how):
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, TOKEN: f"outer:{token}"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )


@contextlib.contextmanager
def tree(token):
    with start(token, TREE) as process:
        assert process.stdout is not None
        pids = {process.pid, *map(int, process.stdout.readline().split())}
        try:
            yield pids
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_family_is_the_processes_with_the_token_and_their_children(token):
    with tree(token) as pids:
        assert {process.pid for process in family(token)} == pids
        assert family(token, spared=pids) == []
        assert family(token[:-1] + "x") == []

        ended = end_family(token)

        assert {leftover.pid for leftover in ended} == pids
        assert sorted(leftover.name for leftover in ended)[-2:] == ["sleep", "sleep"]
        assert not any(map(is_alive, pids))
    assert end_family(token) == []


def test_processes_that_do_not_end_in_time_are_killed(token):
    handle = "import signal, sys, time; signal.signal(15, {}); print(flush=True); time.sleep(1000)"
    obedient, stubborn = handle.format("lambda *_: sys.exit(7)"), handle.format("signal.SIG_IGN")
    with start(token, obedient) as first, start(token, stubborn) as second:
        for process in (first, second):
            assert process.stdout is not None
            process.stdout.readline()

        end_family(token, grace_s=0.5)

        assert first.wait() in (7, -signal.SIGKILL)  # killed on a very busy machine
        assert second.wait() == -signal.SIGKILL


def start_warden(token, descriptor):
    return subprocess.Popen(
        [sys.executable, "-I", "-S", warden.__file__, token],
        stdin=descriptor,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def test_the_warden_ends_all_processes_only_when_its_pipe_ends(token):
    reading, writing = os.pipe()
    with tree(token) as pids, start_warden(token, reading) as process:
        os.close(reading)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            wait_until_ignored(process.pid, signum)
            process.send_signal(signum)
        assert all(map(is_alive, pids))
        os.close(writing)

        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert "the launcher was killed" in process.stderr.read()
        assert not any(map(is_alive, pids))


def test_the_command_line_of_the_warden_does_not_name_this_package(token):
    guard = warden.Warden(token)
    process, deadline_s = psutil.Process(guard.pid), time.monotonic() + TIMEOUT_S
    # In the middle of exec() a process has no command line, before it that of its parent.
    while token not in (command := process.cmdline()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    guard.dismiss()

    assert command[1:] == ["-I", "-S", command[3], token]
    assert command[3].startswith("/dev/fd/")
    assert not psutil.pid_exists(guard.pid)


def wait_until_ignored(pid, signum):
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        with open(f"/proc/{pid}/status") as file:
            mask = next(line.split()[1] for line in file if line.startswith("SigIgn:"))
        if int(mask, 16) >> (signum - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError(f"the warden does not ignore {signum}")
