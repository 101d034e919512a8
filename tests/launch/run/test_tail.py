"""Which parts of the ranks' output are shown, and when."""

from __future__ import annotations

import functools
import types

import pytest

from procpipe.launch.run import view
from procpipe.launch.run.ranks import Attempt, Logs, Rank
from procpipe.launch.run.tail import HeldBack, StallFilter, Tail

TRACEBACK = b'Traceback (most recent call last):\n  File "x.py", line 1\nValueError\n'

VICTIM = b"procpipe: rank 0 ends, because rank 1 failed\n"


def fed(filter, *pieces):
    return [filter.feed(piece) for piece in pieces]


def test_text_is_passed_on_immediately():
    assert fed(HeldBack(), b"one\nt", b"wo", b"\rthree", b"\n") == [
        b"one\nt",
        b"wo",
        b"\rthree",
        b"\n",
    ]


def test_a_traceback_is_held_back_until_it_is_released():
    held = HeldBack()

    assert fed(held, b"one\n" + TRACEBACK, b"more\n") == [b"one\n", b""]
    assert held.release() == TRACEBACK + b"more\n"
    assert fed(held, b"later\n") == [b"later\n"]


def test_a_traceback_that_comes_in_pieces_is_held_back():
    pieces = [bytes([byte]) for byte in b"one\n" + TRACEBACK]
    held = HeldBack()

    assert b"".join(fed(held, *pieces)) == b"one\n"
    assert held.release() == TRACEBACK


def test_text_that_begins_like_a_traceback_is_passed_on():
    assert b"".join(fed(HeldBack(), b"T", b"race", b"backs are long\n")) == b"Tracebacks are long\n"
    assert fed(HeldBack(), b"a ", b"Traceback (most recent call last):\n") == [
        b"a ",
        b"Traceback (most recent call last):\n",
    ]


def test_the_line_of_a_victim_is_held_back():
    for name in (b"rank 0", b"rank 0 (stage 0 of replica 0)"):
        line = b"procpipe: " + name + b" ends, because rank 1 failed\n"

        assert fed(HeldBack(), b"procpipe: hello\n", line) == [b"procpipe: hello\n", b""]


def test_a_traceback_is_passed_on_if_the_process_continues():
    assert fed(HeldBack(hold_s=0.0), TRACEBACK, b"", b"on\n") == [b"", TRACEBACK, b"on\n"]


def test_a_traceback_that_is_kept_is_not_passed_on_by_time():
    held = HeldBack(hold_s=0.0)
    held.keep()

    assert fed(held, b"one\n" + TRACEBACK, b"", b"on\n") == [b"one\n", b"", b""]
    assert held.release() == TRACEBACK + b"on\n"


@pytest.mark.parametrize(
    ("failed_s", "shown"), [(None, VICTIM), (1.0, b"")], ids=["none failed", "one failed"]
)
def test_a_rank_that_ends_late_is_not_shown_twice(
    failed_s, shown, tmp_path, monkeypatch, capfdbinary
):
    """Symptom: a line "rank 0 ends, because …" came before the report that begins with the same."""
    monkeypatch.setattr(view, "HeldBack", functools.partial(HeldBack, hold_s=0.0))
    logs = Logs(0, *(tmp_path / name for name in ("stdout.log", "stderr.log", "error.json")))
    logs.stderr.write_bytes(VICTIM)
    attempt = Attempt(1, (Rank(logs),), failed_s=failed_s)
    screen = view.View(types.SimpleNamespace(attempt=attempt), "off", "")
    screen.stop(is_failed=True)  # its thread; here the test does its work
    screen._follow()
    screen._copy_output()
    screen._copy_output()  # after hold_s
    screen._copy_output(is_last=True)
    for tail in screen._tails:
        tail.close()

    assert capfdbinary.readouterr().err == shown


def test_only_stall_reports_of_other_ranks_are_shown():
    report = b"procpipe: no progress for 3.0 s, reported by rank 1\n  stage 0 (rank 0): in B3\n"
    text = b"hello\n  there\n" + report + b"other\n  thing\n"
    stalls = StallFilter()

    assert b"".join(fed(stalls, *(bytes([byte]) for byte in text))) == report


def test_a_file_is_followed_from_before_it_exists(tmp_path):
    path = tmp_path / "log"
    followed = Tail(path)

    assert followed.read() == b""
    path.write_bytes(b"one")
    assert followed.read() == b"one"
    assert followed.read() == b""
    with path.open("ab") as file:
        file.write(b"two")
    assert followed.read() == b"two"
    followed.close()
