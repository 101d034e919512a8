"""A process's board, as other processes of the host read it.

That what a killed or stopped process wrote last can be read: tests/faults. That it is
closed: tests/dist/test_memory.py.
"""

from __future__ import annotations

import os
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


@pytest.mark.usefixtures("board")
def test_a_process_without_a_board():
    """A loader's worker has its parent's open; a file of that name may be just being made."""

    def look():
        os.write(os.memfd_create("procpipe-board"), bytes(sizeof(Page)))
        return Board.of_process(os.getpid()), Board.of_process(2**22 + 1)

    assert in_child(look) == "(None, None)"


def test_a_closed_board_keeps_its_content_for_its_process():
    board = Board.create(0, 1)
    board.start_call("step")

    board.close()

    assert board.read().call == "step"
