"""Starting ranks with a time limit: no process is left, and a failure has a reason."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from procpipe.job import board
from procpipe.launch import start_ranks as starting
from procpipe.launch.doctor.checks import Status, check_channels
from procpipe.launch.start_ranks import start_ranks

pytestmark = pytest.mark.dist


@pytest.fixture
def token(monkeypatch):
    """Mark the processes that are started; none may be left at the end."""
    token = uuid.uuid4().hex
    monkeypatch.setenv("PROCPIPE_DOCTOR_TEST", token)
    yield token
    deadline_s = time.monotonic() + 30
    while left := marked_processes(token):  # a killed process takes a moment to end
        if time.monotonic() > deadline_s:
            for process in left:
                process.kill()
            raise AssertionError(f"left behind: {left}")


def marked_processes(token):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # an ended process has no environment
            if token in process.environ().values() and process.pid != os.getpid():
                found.append(process)
    return found


def python(code):
    """Return a program of torchrun: code that imports no packages."""
    return ["--no-python", sys.executable, "-S", "-c", code]


@pytest.mark.dist
@pytest.mark.usefixtures("token")
def test_the_reason_has_the_last_lines_of_a_rank_that_fails():
    code = "import os\nif os.environ['RANK'] == '1': raise ValueError('a bad day')"

    result = start_ranks(2, python(code), timeout_s=90.0)

    assert result.value is None
    assert result.reason.startswith("exit code 1\n")
    assert result.reason.splitlines()[-1] == "  rank 1: ValueError: a bad day"
    (check,) = check_channels(result, 2)
    assert check.status == Status.FAILURE
    assert check.found.startswith("2 processes could not measure the channels between them: exit")


@pytest.mark.dist
@pytest.mark.usefixtures("token")
def test_ranks_that_hang_are_ended():
    result = start_ranks(1, python("import signal; signal.pause()"), timeout_s=1.5)

    assert result.value is None
    assert result.reason.startswith("no end within 1.5 s")


#: Starts a process that writes on its board and then waits for ever.
HANG = """
import importlib.util, os, signal, sys
if os.fork() == 0:
    spec = importlib.util.spec_from_file_location("board", sys.argv[1])
    sys.modules["board"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["board"])
    board = sys.modules["board"].Board.create(3, 4)
    board.start_call("step")
    board.note_wait("activation 2", 1)
signal.pause()
"""


@pytest.mark.usefixtures("token")
def test_the_reason_names_the_place_where_a_rank_hangs():
    launcher = subprocess.Popen([sys.executable, "-S", "-c", HANG, board.__file__])
    try:
        deadline_s = time.monotonic() + 60
        while not (where := starting._places(launcher)) or "activation" not in where[0]:
            assert time.monotonic() < deadline_s
    finally:
        starting._end(launcher)

    assert len(where) == 1
    assert where[0].startswith("  rank 3: in step(), waiting ")
    assert where[0].endswith(" s for activation 2")
