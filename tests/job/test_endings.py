"""What a launched process prints as it ends.

That each rank prints one line or a traceback, and names the right rank: tests/faults.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest

from procpipe.errors import DisagreementError, PeerLostError, RemoteStageError, StageClosedError
from procpipe.job import endings
from procpipe.job.board import Board
from procpipe.job.endings import follow_exceptions, line_of
from tests.cases import for_each
from tests.forked import in_child

pytestmark = pytest.mark.dist  # some fork

STORY = "stage 1 (rank 1), in step(): KeyError: 'boom'\nTraceback (most recent call last):\n  …"
ENDS = "procpipe: rank 2 ends, because"
DISAGREEMENT = DisagreementError(["chunks is 3 on rank 0 and 2 on rank 1"])


# -- lines ---------------------------------------------------------------------------------------


SHARED = RuntimeError("gloo")
SHARED.shared_with = [0, 2]  # type: ignore[attr-defined]


def victim_of(rank: int, because: str) -> dict[str, Any]:
    return {"victim_of": rank, "because": because}


@for_each(
    ("error", "line", "note"),
    [
        (
            RemoteStageError(1, STORY),
            f"{ENDS} rank 1 failed in step(): KeyError: 'boom'",
            victim_of(1, "rank 1 failed in step(): KeyError: 'boom'"),
        ),
        (RemoteStageError(1, ""), f"{ENDS} rank 1 failed", victim_of(1, "rank 1 failed")),
        (PeerLostError(1, "rank 1 left"), f"{ENDS} rank 1 left", victim_of(1, "rank 1 left")),
        (
            DISAGREEMENT,
            f"{ENDS} of the DisagreementError of rank 0",
            victim_of(0, "rank 0 failed: DisagreementError"),
        ),
        (ValueError("mine"), "", None),
        (StageClosedError("closed"), "", None),
        (SHARED, "", {"shared_with": [0, 2]}),
    ],
)
def test_what_a_victim_prints_and_notes(monkeypatch, tmp_path, error, line, note):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    reading, file = Board.create(2, 4).read(), tmp_path / "victim.json"
    file.unlink(missing_ok=True)

    endings.note_victim(error, reading)

    assert line_of(error, reading) == line
    assert (json.loads(file.read_text()) if file.exists() else None) == note


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
    board.note_wait("gradient from stage 3 (rank 3)", time.monotonic_ns())
    waits = line_of(error, board.read())
    assert waits.startswith(f"{line}; it was in B3, waiting 0.")
    assert waits.endswith(" s for gradient from stage 3 (rank 3)")
    board.note_wait("")
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
        return ""


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


def test_an_exit_of_a_thread_is_no_failure(printed):
    follower = Follower()
    follow_exceptions(follower)
    threading.excepthook(threading.ExceptHookArgs((SystemExit, SystemExit(1), None, None)))

    assert follower.errors == []
    assert len(printed) == 1


def test_an_interrupt_during_the_report_does_not_replace_it(monkeypatch, printed):
    """Seen with Ctrl-C: a rank printed "Error in sys.excepthook" instead of why it ended."""
    monkeypatch.setattr(sys, "excepthook", lambda *args: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    follow_exceptions(Follower())
    sys.excepthook(ValueError, ValueError("mine"), None)


def test_an_end_at_once_waits_for_a_save_only(capfd):
    def end():
        for name in (endings.SAVING_THREAD, "another"):
            act = (lambda: print("saved")) if name != "another" else threading.Event().wait
            threading.Thread(target=act, name=name).start()
        endings.end_at_once("the line")

    assert in_child(end) == ""
    assert capfd.readouterr() == ("saved\n", "the line\n")


def test_a_worker_ends_with_its_launcher(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    reader, writer = os.pipe()

    def launch():
        if os.fork() == 0:
            endings.end_with_launcher()
            os.write(writer, b"ready")
            time.sleep(10)
            os.write(writer, b"alive")
            os._exit(0)
        os.read(reader, 5)

    in_child(launch)  # ends when both processes have

    os.close(writer)
    with open(reader) as file:
        assert file.read() == ""


def test_a_worker_ends_whose_launcher_has_died_before(monkeypatch):
    """As on a host of several, whose store is on another."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv(endings.LAUNCHER, f"{os.getpid()} a-run")
    assert in_child(endings.end_with_launcher) == "None"
    launcher = os.fork()
    if launcher == 0:
        os._exit(0)
    os.waitpid(launcher, 0)
    monkeypatch.setenv(endings.LAUNCHER, f"{launcher} another-run")
    assert in_child(endings.end_with_launcher) == "None"
    monkeypatch.setenv(endings.LAUNCHER, f"{launcher} a-run")
    assert f"the launcher, process {launcher}, has ended" in in_child(endings.end_with_launcher)
