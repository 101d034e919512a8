"""The end of a launched process: what it prints, and that it does not outlive its launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from procpipe.errors import (
    DisagreementError,
    PeerLostError,
    RemoteStageError,
    StageClosedError,
)
from procpipe.job import endings
from procpipe.job.board import Board
from procpipe.job.endings import follow_exceptions, line_of
from tests.cases import for_each
from tests.test_forks import in_child

DEADLINE_S = 30.0

STORY = "stage 1 (rank 1), in step(): KeyError: 'boom'\nTraceback (most recent call last):\n  …"
VICTIM = "procpipe: rank 2 ends, because rank 1 failed in step(): KeyError: 'boom'"
DISAGREEMENT = DisagreementError(["chunks is 3 on rank 0 and 2 on rank 1"])


def in_finally(first, then):
    then.__context__ = first
    return then


# -- lines ---------------------------------------------------------------------------------------


@for_each(
    ("error", "line"),
    [
        (RemoteStageError(1, STORY), VICTIM),
        (RemoteStageError(1, ""), "procpipe: rank 2 ends, because rank 1 failed"),
        (PeerLostError(1, "rank 1 is lost"), "procpipe: rank 2 ends, because rank 1 is lost"),
        (
            DISAGREEMENT,
            "procpipe: rank 2 ends, because of the DisagreementError of rank 0",
        ),
        (
            in_finally(RemoteStageError(1, STORY), StageClosedError("save() cannot run")),
            f"{VICTIM}; then save() cannot run",
        ),
        (ValueError("mine"), ""),
        (StageClosedError("closed"), ""),
    ],
)
def test_the_line_of_a_victim(error, line):
    assert line_of(error, Board.create(2, 4).read()) == line


def test_a_line_names_replicas_and_what_the_rank_did():
    board = Board.create(2, 4)
    board.page.num_replicas = 2
    error = RemoteStageError(1, "stage 1 of replica 0 (rank 1), in step(): KeyError: 'boom'")
    line = (
        "procpipe: rank 2 (stage 0 of replica 1) ends, because rank 1 (stage 1 of replica 0) "
        "failed in step(): KeyError: 'boom'"
    )
    assert line_of(error, board.read()) == line
    assert line_of(DISAGREEMENT, board.read(), 2) == ""  # the first rank prints all of it

    board.start_call("step")
    board.start_task("B", 3)
    board.start_wait("gradient from stage 3 (rank 3)", time.monotonic_ns())
    waits = line_of(error, board.read())
    assert waits.startswith(f"{line}; it was in B3, waiting 0.")
    assert waits.endswith(" s for gradient from stage 3 (rank 3)")
    board.end_wait()
    interrupted = line_of(KeyboardInterrupt(), board.read())
    assert interrupted.startswith(
        "procpipe: rank 2 (stage 0 of replica 1) was interrupted in B3, for 0."
    )


# -- exceptions that end a thread ----------------------------------------------------------------


class Follower:
    def __init__(self):
        self.errors = []

    def thread_raised(self, error):
        self.errors.append(error)


@pytest.fixture
def printed(monkeypatch):
    """The errors that the hooks of before have printed; the new hooks are undone at the end."""
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: printed.append(args[1]))
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))
    endings._hooks.cache_clear()
    before = signal.getsignal(signal.SIGINT)
    yield printed
    signal.signal(signal.SIGINT, before)
    endings._hooks.cache_clear()


def end_main_thread(error):
    sys.excepthook(type(error), error, None)


def end_thread(error):
    threading.excepthook(threading.ExceptHookArgs((type(error), error, None, None)))


@pytest.mark.parametrize("end", [end_main_thread, end_thread])
def test_a_victim_prints_a_line_and_all_others_a_traceback(printed, capfd, end):
    board, follower, dropped = Board.create(2, 4), Follower(), Follower()
    for _ in range(2 * sys.getrecursionlimit()):  # as many stages as one likes have one hook
        follow_exceptions(follower, board)
        follow_exceptions(dropped, board)
    remote, own = RemoteStageError(1, STORY), KeyError("mine")
    del dropped
    for error in (remote, own):
        end(error)

    assert capfd.readouterr().err == f"{VICTIM}\n"
    assert printed == [own]
    assert follower.errors == [remote, own]


def test_an_exit_of_a_thread_is_no_failure(printed):
    follower = Follower()
    follow_exceptions(follower, Board.create(2, 4))
    end_thread(SystemExit(1))

    assert follower.errors == []
    assert len(printed) == 1


@pytest.mark.dist
def test_hooks_do_nothing_in_a_forked_child(printed, capfd):
    follower = Follower()
    follow_exceptions(follower, Board.create(2, 4))

    def end_in_child():
        end_main_thread(RemoteStageError(1, STORY))
        return len(printed), follower.errors

    assert in_child(end_in_child) == "(1, [])"
    assert capfd.readouterr().err == ""


def test_an_interrupt_during_the_report_does_not_replace_it(monkeypatch, printed):
    """Seen with Ctrl-C: a rank printed "Error in sys.excepthook" instead of why it ended."""
    monkeypatch.setattr(sys, "excepthook", lambda *args: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    follow_exceptions(Follower(), Board.create(2, 4))
    end_main_thread(ValueError("mine"))


@pytest.mark.dist
def test_an_end_at_once_waits_for_a_save_only(capfd):
    def end():
        for name in (endings.SAVING_THREAD, "another"):
            act = (lambda: print("saved")) if name != "another" else threading.Event().wait
            threading.Thread(target=act, name=name).start()
        endings.end_at_once("the line")

    assert in_child(end) == ""
    assert capfd.readouterr() == ("saved\n", "the line\n")


# -- with the launcher ---------------------------------------------------------------------------

#: A launcher with a store starts a worker that would run for a minute.
LAUNCHER = """
import os, socket, subprocess, sys
store = socket.create_server(("127.0.0.1", 0))
environment = dict(
    os.environ, RANK="0", TORCHELASTIC_RUN_ID="x", TORCHELASTIC_USE_AGENT_STORE="True",
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.getsockname()[1]),
)
code = '''
import signal
from procpipe.job.endings import end_with_launcher
end_with_launcher()
print("ready", flush=True)
signal.alarm(60)
signal.pause()
'''
subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True).wait()
"""


@pytest.mark.dist
def test_a_worker_ends_with_its_launcher():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    (worker,) = psutil.Process(launcher.pid).children()
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()

    deadline_s = time.monotonic() + DEADLINE_S
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("uses_agent_store", [True, False])
def test_only_the_launchers_store_must_exist(monkeypatch, uses_agent_store):
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("PROCPIPE_RUN", "x")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(uses_agent_store))
        endings.end_with_launcher()
    if uses_agent_store:
        with pytest.raises(
            ConnectionRefusedError, match=f"rank 1 finds no launcher at 127.0.0.1:{port}"
        ):
            endings.end_with_launcher()
    else:
        endings.end_with_launcher()


def test_without_torchrun_no_launcher_is_checked(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("ctypes.CDLL", None)

    endings.end_with_launcher()
