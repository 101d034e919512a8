"""A process's board, as other processes of the host read it.

That what a killed or stopped process wrote last can be read: tests/faults. That it is
closed: tests/dist/test_descriptors.py.
"""

from __future__ import annotations

import os
import time
from ctypes import sizeof

import pytest

from procpipe.job.board import Board, Page
from tests.forked import in_child

pytestmark = pytest.mark.dist


@pytest.fixture
def board():
    older, board = Board.create(0, 1), Board.create(2, 4)
    yield board
    for each in (older, board):
        each.close()


def found():
    """Return what is found in the files of this process: the newest of its boards."""
    reader = Board.of_process(os.getpid())
    assert reader is not None
    return reader


def test_a_process_reads_what_is_written(board):
    board.page.device = "cpu"
    reader = found()
    new = reader.read()
    board.start_call("step")
    board.page.num_micro_batches = 8
    in_step = reader.read()
    board.start_task("F", 3)
    board.page.layer, board.page.device_bytes = "b", 5
    in_layer = reader.read()
    board.note_wait("activation 3", time.monotonic_ns() - 2 * 10**9)
    waiting = reader.read()
    board.note_wait("")
    board.page.task = ""
    board.end_call()
    board.page.busy_s, board.page.num_steps = 3, 1
    board.fail()
    done = reader.read()

    assert (new.pid, new.rank, new.num_ranks) == (os.getpid(), 2, 4)
    assert new.device == "cpu"
    assert (new.call, new.task, new.layer, new.waits_for) == ("", "", "", "")
    assert new.where().startswith("between calls, in the user's code, for 0.")
    assert in_step.where().startswith("in step(), last active 0.")
    assert (in_layer.task, in_layer.layer, in_layer.micro_batch) == ("F3", "b", 3)
    assert in_layer.where().startswith("in F3, b, for 0.")
    assert waiting.waits_for == "activation 3"
    assert 2 <= waiting.waited_s < 60
    assert waiting.where().startswith("in F3, waiting ")
    assert waiting.where().endswith(" s for activation 3")
    assert (done.waits_for, done.task, done.call) == ("", "", "")
    assert (done.num_steps, done.num_micro_batches) == (1, 8)
    assert (done.busy_s, done.device_bytes) == (3, 5)
    assert done.has_failed


@pytest.mark.usefixtures("board")
def test_a_process_without_a_board():
    """A loader's worker has its parent's open; a file of that name may be just being made."""

    def look():
        os.write(os.memfd_create("procpipe-board"), bytes(sizeof(Page)))
        return Board.of_process(os.getpid()), Board.of_process(2**22 + 1)

    assert in_child(look) == "(None, None)"


def test_texts_that_are_too_long_are_cut(board):
    board.start_call("x" + "ä" * 1000)

    assert found().read().call == "x" + "ä" * 127


def test_a_closed_board_keeps_its_content_for_its_process():
    board = Board.create(0, 1)
    board.start_call("step")

    board.close()

    assert board.read().call == "step"
