"""Reports of stalls, printed from the boards of this host's processes."""

from __future__ import annotations

import os
import signal
import socket
import time

import psutil
import pytest

from procpipe.channel.mesh import Mesh
from procpipe.job.board import Board
from procpipe.job.grid import Grid
from procpipe.job.stalls import StallReports
from tests.dist.forks import ROOT, fork_server
from tests.dist.pool import job_environment

#: A process with a board that stays in a layer.
PEER = """
import sys
from procpipe.job.board import Board
board = Board.create(1, 2)
board.write_facts({"layers": ["layer 'a' (Linear)", "layer 'b' (Conv2d)"]})
board.start_call("step")
board.start_task("F", 3)
board.enter_layer(1)
print("ready", flush=True)
sys.stdin.read()
"""

DEADLINE_S = 30.0


@pytest.fixture
def peer():
    """Rank 1 in its own process."""
    child_in, parent_in = os.pipe()
    parent_out, child_out = os.pipe()
    argv, files = ["-c", PEER], (child_in, child_out, 2)
    process = fork_server().start(argv, env=job_environment(), cwd=ROOT, files=files)
    os.close(child_in)
    os.close(child_out)
    with open(parent_out) as output, open(parent_in, "w"):
        assert output.readline() == "ready\n"
        yield process
        process.kill()
        process.wait()


@pytest.fixture
def reports():
    """The reports of rank 0."""
    board = Board.create(0, 2)
    board.start_call("step")
    board.start_task("B", 2)
    return StallReports(board, Grid(0, 2))


def find_boards(reports, peer=None, peers=(1,)):
    """Call ``find_boards`` of the reports; ``peer`` is the process of rank 1."""
    pairs = {number: socket.socketpair() for number in peers}
    sockets = {number: ours for number, (ours, _) in pairs.items()}
    mesh = Mesh(0, sockets, timeout_s=1.0, stall_timeout_s=1.0, reports=reports)
    reports.find_boards(mesh)
    mesh.close()
    for _, theirs in pairs.values():
        theirs.close()
    if peer is not None:  # the other end of a socket pair is in this process
        reports._boards[1] = Board.of_process(peer.pid)


def wait_status(pid, status):
    deadline_s = time.monotonic() + DEADLINE_S
    while psutil.Process(pid).status() != status:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.dist
def test_a_stall_report_has_the_place_of_every_rank(reports, peer, capfd):
    find_boards(reports, peer)
    reports.start_wait("gradient 2 from stage 1 (rank 1)", time.monotonic() - 3.0)
    reports.stalled("gradient 2 from stage 1 (rank 1)", 3.0)

    headline, first, second = capfd.readouterr().err.splitlines()
    assert headline == "procpipe: no progress for 3.0 s, reported by rank 0"
    assert first.startswith("  stage 0 (rank 0): in B2, waiting 3.")
    assert first.endswith("gradient 2 from stage 1 (rank 1)")
    assert second.startswith("  stage 1 (rank 1): in F3, layer 'b' (Conv2d), for ")


@pytest.mark.dist
def test_a_stall_report_names_processes_that_do_not_run(reports, peer, capfd):
    find_boards(reports, peer)
    peer.send_signal(signal.SIGSTOP)
    wait_status(peer.pid, psutil.STATUS_STOPPED)
    reports.stalled("something", 1.0)
    peer.kill()
    wait_status(peer.pid, psutil.STATUS_ZOMBIE)
    reports.stalled("something", 2.0)
    peer.wait()
    reports.stalled("something", 4.0)

    lines = [line for line in capfd.readouterr().err.splitlines() if "stage 1" in line]
    way_out = f"is stopped (kill -CONT {peer.pid} continues it)"
    assert [line.partition("; its process ")[2] for line in lines] == [
        f"{peer.pid} {way_out}",
        f"{peer.pid} has ended",
        f"{peer.pid} has ended",
    ]


def test_a_stall_report_says_where_layers_are_sharded(reports, capfd):
    reports._board.write_facts({"shards": [0, 2]})
    reports.stalled("something", 1.0)
    reports.start_wait("gradient 2 from stage 1 (rank 1)", time.monotonic() - 3.0)
    reports.stalled("something", 3.0)

    lines = [line for line in capfd.readouterr().err.splitlines() if "stage 0" in line]
    assert [line.partition("; ")[2] for line in lines] == [
        "it may wait for another of ranks [0, 2], over which its layers are sharded, and which "
        "must make the same calls",
        "",
    ]


def test_a_stall_report_names_peers_on_other_hosts(reports, capfd):
    ours, theirs = (socket.socket(socket.AF_INET) for _ in range(2))
    mesh = Mesh(0, {1: ours}, timeout_s=1.0, stall_timeout_s=1.0, reports=reports)
    reports.find_boards(mesh)
    reports.stalled("something", 1.0)
    mesh.close()
    theirs.close()

    assert capfd.readouterr().err.splitlines()[2] == "  stage 1 (rank 1): on another host"
    assert reports.last_seen(1) == ""


@pytest.mark.parametrize(
    ("is_reported", "waited_s", "expected"), [(True, 3.0, False), (False, 3.0, True)]
)
def test_a_stall_that_another_rank_has_just_reported_is_not_reported_again(
    reports, capfd, is_reported, waited_s, expected
):
    peer_board = Board.create(1, 2)
    if is_reported:
        peer_board.note_report()
    find_boards(reports)
    reports._boards[1] = peer_board
    reports.stalled("something", waited_s)

    assert bool(capfd.readouterr().err) == expected
    assert (reports._board.read().reported_s is not None) == expected


def test_a_report_of_an_earlier_stall_does_not_suppress_a_later_one(reports, capfd):
    peer_board = Board.create(1, 2)
    peer_board.note_report()
    deadline_s = time.monotonic() + DEADLINE_S
    while (reported_s := peer_board.read().reported_s) is None or reported_s < 0.05:
        assert time.monotonic() < deadline_s
    find_boards(reports)
    reports._boards[1] = peer_board
    reports.stalled("something", 0.05)

    assert "no progress" in capfd.readouterr().err


def test_only_the_rank_that_reported_a_stall_reports_its_end(reports, capfd):
    find_boards(reports)
    reports.start_wait("an activation", time.monotonic() - 2.0)
    reports.end_wait()
    assert capfd.readouterr().err == ""

    reports.start_wait("an activation", time.monotonic() - 2.0)
    reports.stalled("an activation", 2.0)
    reports.end_wait()
    reports.end_wait()
    lines = [line for line in capfd.readouterr().err.splitlines() if "continues" in line]
    assert len(lines) == 1
    assert lines[0].startswith("procpipe: stage 0 (rank 0) continues after 2.")


@pytest.mark.dist
def test_last_seen_is_read_from_the_board_of_a_dead_peer(reports, peer):
    find_boards(reports, peer)
    peer.kill()
    peer.wait()

    seen = reports.last_seen(1)
    assert seen.startswith("it was last seen in F3, layer 'b' (Conv2d), for ")
    assert reports.last_seen(7) == ""


def test_a_unix_socket_shows_the_process_at_its_other_end():
    """Here both ends are in this process, and its newest board is found."""
    board = Board.create(5, 6)
    board.start_call("fetch")
    reports = StallReports(Board.create(0, 2), Grid(0, 2))
    board.end_call()  # so that it is the newest
    find_boards(reports)

    assert reports._boards[1].read().pid == os.getpid()
    assert reports._boards[1].read().rank == 5
