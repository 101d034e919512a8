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
from tests.test_forks import in_child

from procpipe.errors import DisagreementError, MemoryLimitError, PeerLostError, RemoteStageError
from procpipe.job import endings
from procpipe.job.board import Board
from procpipe.job.endings import print_victims_briefly

DEADLINE_S = 30.0

STORY = "stage 1 (rank 1), in step(): KeyError: 'boom'\nTraceback (most recent call last):\n  …"


@pytest.fixture
def board(monkeypatch):
    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)  # restored after the test
    endings._victims.cache_clear()  # so that the hooks are replaced again
    return Board.create(2, 4)


def test_a_victim_among_replicas_is_named_by_replica_and_stage(board):
    board.divide(2)
    error = RemoteStageError(1, "stage 1 of replica 0 (rank 1), in step(): KeyError: 'boom'")

    assert endings.line_of(2, error, board.read()) == (
        "procpipe: rank 2 (stage 0 of replica 1) ends, because rank 1 (stage 1 of replica 0) "
        "failed in step(): KeyError: 'boom'"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RemoteStageError(1, STORY),
            "procpipe: rank 2 ends, because rank 1 failed in step(): KeyError: 'boom'",
        ),
        (RemoteStageError(1, ""), "procpipe: rank 2 ends, because rank 1 failed"),
        (
            PeerLostError(1, "rank 1 ended without a message"),
            "procpipe: rank 2 ends, because rank 1 ended without a message",
        ),
        (
            DisagreementError(["chunks is 3 on rank 0 and 2 on rank 1"]),
            "procpipe: rank 2 ends, because the ranks do not agree (rank 0 prints on what)",
        ),
        (
            MemoryLimitError([(1, 392, 100)]),
            "procpipe: rank 2 ends, because no plan keeps to memory_limit_bytes (rank 0 prints "
            "what each stage needs)",
        ),
    ],
    ids=["a failure", "a failure without a story", "a loss", "a disagreement", "a memory limit"],
)
def test_a_victim_prints_one_line(board, monkeypatch, capfd, error, line):
    raised = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: raised.append(args))
    print_victims_briefly(2, board)
    sys.excepthook(type(error), error, None)

    assert capfd.readouterr().err == f"{line}\n"
    assert raised == []


def test_a_victim_prints_what_it_waited_for(board, monkeypatch, capfd):
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    print_victims_briefly(2, board)
    board.start_call("step")
    board.start_task("B", 3)
    board.start_wait("gradient from stage 3 (rank 3)", time.monotonic_ns())
    error = RemoteStageError(1, STORY)
    sys.excepthook(type(error), error, None)

    printed = capfd.readouterr().err
    assert "KeyError: 'boom'; it was in B3, waiting 0." in printed
    assert printed.endswith(" s for gradient from stage 3 (rank 3)\n")
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("rank", "error"),
    [(2, ValueError("mine")), (0, DisagreementError(["chunks is 3 on rank 0 and 2 on rank 1"]))],
)
def test_the_rank_that_failed_prints_its_traceback(board, monkeypatch, capfd, rank, error):
    raised = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: raised.append(args))
    print_victims_briefly(rank, board)
    sys.excepthook(type(error), error, None)

    assert raised == [(type(error), error, None)]
    assert capfd.readouterr().err == ""


def test_an_interrupt_during_the_report_does_not_replace_it(board, monkeypatch, capfd):
    """Seen with Ctrl-C: a rank printed "Error in sys.excepthook" instead of why it ended."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sys, "excepthook", lambda *args: signal.raise_signal(signal.SIGINT))
        print_victims_briefly(2, board)
        sys.excepthook(ValueError, ValueError("mine"), None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_prints_the_place_of_the_rank(board, monkeypatch, capfd):
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    print_victims_briefly(2, board)
    board.start_call("step")
    board.start_task("F", 1)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)

    assert capfd.readouterr().err.startswith("procpipe: rank 2 was interrupted in F1, for 0.")


def test_a_victim_that_trains_in_a_thread_prints_one_line(board, monkeypatch, capfd):
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    print_victims_briefly(2, board)
    remote_error, own_error = RemoteStageError(1, STORY), KeyError("mine")
    for error in (remote_error, own_error):
        threading.excepthook(threading.ExceptHookArgs((type(error), error, None, None)))

    line = "procpipe: rank 2 ends, because rank 1 failed in step(): KeyError: 'boom'\n"
    assert capfd.readouterr().err == line
    assert [args.exc_value for args in raised] == [own_error]


@pytest.mark.dist
def test_a_forked_child_is_no_victim(board, monkeypatch, capfd):
    raised = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: raised.append(args))
    print_victims_briefly(2, board)
    error = RemoteStageError(1, STORY)

    assert in_child(lambda: sys.excepthook(type(error), error, None) or len(raised)) == "1"
    assert capfd.readouterr().err == ""


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
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(uses_agent_store))
        endings._check_launcher()
    if uses_agent_store:
        with pytest.raises(
            ConnectionRefusedError, match=f"rank 1 finds no launcher at 127.0.0.1:{port}"
        ):
            endings._check_launcher()
    else:
        endings._check_launcher()


def test_without_torchrun_no_launcher_is_checked(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("ctypes.CDLL", None)

    endings.end_with_launcher()


def test_many_stages_have_one_hook(board, capfd):
    for _ in range(2 * sys.getrecursionlimit()):
        print_victims_briefly(2, board)
    error = RemoteStageError(1, STORY)
    sys.excepthook(type(error), error, None)
    assert capfd.readouterr().err.count("rank 2 ends") == 1
