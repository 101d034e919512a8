"""Reports of stalls, printed from the boards of this host's processes."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil
import pytest

from procpipe.errors import RemoteStageError
from procpipe.job.board import Board
from procpipe.job.grid import Grid
from procpipe.job.stalls import StallReports
from tests.cases import for_each
from tests.channel.meshes import Peer, make_mesh
from tests.test_forks import in_child

DEADLINE_S = 30.0

SHARDS = (
    "; it may wait for another of ranks [0, 2], over which its layers are sharded, and which must "
    "make the same calls"
)


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
    board.write_facts({"layers": ["layer 'a' (Linear)", "layer 'b' (Conv2d)"]})
    board.start_call("step")
    board.start_task("F", 3)
    board.page.layer_index = 1
    return board


@pytest.fixture
def reports(theirs):
    """The reports of rank 0 of 3; rank 2 is on another host."""
    board = Board.create(0, 3)
    board.start_call("step")
    board.start_task("B", 2)
    reports = StallReports(board, Grid(0, 3))
    mesh = make_mesh(0)
    peers = [Peer(mesh, rank) for rank in (1, 2)]
    reports.open_boards(mesh, {1: [theirs.descriptor]})
    yield reports
    mesh.close()
    for peer in peers:
        peer.end()


def test_a_stall_report_has_the_place_of_every_rank(reports, capfd):
    reports.start_wait("gradient 2 from stage 1 (rank 1)", time.monotonic() - 3.0)
    reports.stalled("gradient 2 from stage 1 (rank 1)", 3.0)

    headline, first, second, third = capfd.readouterr().err.splitlines()
    assert headline == "procpipe: no progress for 3.0 s, reported by rank 0"
    assert first.startswith("  stage 0 (rank 0): in B2, waiting 3.")
    assert first.endswith("gradient 2 from stage 1 (rank 1)")
    assert second.startswith("  stage 1 (rank 1): in F3, layer 'b' (Conv2d), for ")
    assert third == "  stage 2 (rank 2): on another host"


def test_processes_that_do_not_run_are_named(reports, process, capfd):
    process.send_signal(signal.SIGSTOP)
    wait_status(process.pid, psutil.STATUS_STOPPED)
    reports.stalled("something", 1.0)
    process.kill()
    process.wait()
    reports.stalled("something", 4.0)

    lines = [line for line in capfd.readouterr().err.splitlines() if "stage 1" in line]
    pid = process.pid
    assert [line.partition("; its process ")[2] for line in lines] == [
        f"{pid} is stopped (kill -CONT {pid} continues it)",
        "",
    ]
    assert reports.last_seen(1).startswith("it was last seen in F3, layer 'b' (Conv2d), for ")
    assert reports.last_seen(2) == ""


def wait_status(pid, status):
    deadline_s = time.monotonic() + DEADLINE_S
    while psutil.Process(pid).status() != status:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("waits", [True, False])
def test_a_report_says_where_layers_are_sharded(reports, capfd, waits):
    reports._board.write_facts({"shards": [0, 2]})
    if waits:
        reports.start_wait("gradient 2 from stage 1 (rank 1)", time.monotonic())
    reports.stalled("something", 1.0)

    assert (SHARDS in capfd.readouterr().err) == (not waits)


@for_each(
    ("reported_before_s", "waited_s", "expected"),
    [(None, 3.0, True), (0.0, 3.0, False), (4.0, 3.0, True)],
)
def test_one_rank_reports_a_stall(reports, theirs, capfd, reported_before_s, waited_s, expected):
    theirs.page.reported_ns = reports._board.page.reported_ns = 0
    if reported_before_s is not None:
        theirs.page.reported_ns = time.monotonic_ns() - int(reported_before_s * 1e9)
    reports.stalled("something", waited_s)

    assert bool(capfd.readouterr().err) == expected
    assert bool(reports._board.page.reported_ns) == expected


def test_the_rank_that_reported_a_stall_reports_its_end(reports, capfd):
    for has_reported in (False, True):
        reports.start_wait("an activation", time.monotonic() - 2.0)
        if has_reported:
            reports.stalled("an activation", 2.0)
        reports.end_wait()
        reports.end_wait()
        lines = [line for line in capfd.readouterr().err.splitlines() if "continues" in line]
        assert len(lines) == has_reported
    assert lines[0].startswith("procpipe: stage 0 (rank 0) continues after 2.")


@pytest.mark.dist
def test_a_process_that_is_stuck_ends_with_a_line(reports, capfd):
    story = "stage 1 (rank 1), in step(): KeyError: 'boom'\nTraceback"

    assert in_child(lambda: reports.end_process(RemoteStageError(1, story))) == ""
    assert capfd.readouterr().err == (
        "procpipe: rank 0 ends, because rank 1 failed in step(): KeyError: 'boom'\n"
    )
