"""What reports of stalls say, also of ranks that are elsewhere, have ended or are sharded.

When they are printed: tests/channel/test_monitor.py. That a stopped rank is reported, and that the
run continues after it: tests/faults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from procpipe.job.board import Board
from procpipe.job.grid import Grid
from procpipe.job.stalls import StallReports


@pytest.fixture
def process():
    """A process of no content: that of rank 1."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def theirs(process):
    """The board of rank 1, in a layer."""
    board = Board.create(1, 3)
    board.page.pid = process.pid
    board.start_call("step")
    board.start_task("F", 3)
    board.page.layer = "layer 'b' (Conv2d)"
    return board


@pytest.fixture
def reports(theirs):
    """The reports of rank 0 of 3; rank 2 is on another host."""
    board = Board.create(0, 3)
    board.start_call("step")
    board.start_task("B", 2)
    reports = StallReports(board, Grid(0, 3))
    reports.open_boards({1: [theirs.descriptor]})
    return reports


def test_a_report_has_the_place_of_every_rank_and_names_those_that_do_not_run(
    reports, process, capfd
):
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it is stopped
    reports.note_wait("gradient 2 from stage 1 (rank 1)", time.monotonic() - 3.0)
    reports.stalled("gradient 2 from stage 1 (rank 1)", 3.0)
    process.kill()
    process.wait()
    reports.stalled("something", 6.0)

    headline, first, *_, last = printed = capfd.readouterr().err.splitlines()
    assert headline == "procpipe: no progress for 3.0 s, reported by rank 0"
    assert first.startswith("  stage 0 (rank 0): in B2, waiting 3.")
    assert first.endswith("gradient 2 from stage 1 (rank 1)")
    assert last == "  stage 2 (rank 2): unknown: on another host, or not connected yet"
    lines = [line for line in printed if "  stage 1 (rank 1): in F3, layer 'b' (Conv2d)" in line]
    pid = process.pid
    assert [line.partition("; its process ")[2] for line in lines] == [
        f"{pid} is stopped (kill -CONT {pid} continues it)",
        "",
    ]
    assert reports.last_seen(1).startswith("it was last seen in F3, layer 'b' (Conv2d), for ")
    assert reports.last_seen(2) == ""


def test_only_one_rank_reports(reports, theirs, capfd):
    theirs.page.reported_ns = time.monotonic_ns()
    reports.stalled("something", 3.0)
    assert capfd.readouterr().err == ""
