"""Rows of the table, from real boards."""

from __future__ import annotations

from pathlib import Path

import psutil

from procpipe.job.board import Board
from procpipe.launch.run.ranks import Rank
from procpipe.launch.run.table import Rows


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def shown(rows):
    """Return what is in each column, by rank."""
    columns = rows.table().columns
    cells = zip(*(column.cells for column in columns), strict=True)
    names = [str(column.header) for column in columns]
    return [dict(zip(names, map(str, row), strict=True)) for row in cells]


def do_steps(board, num_steps, *, samples=0, busy_s=0.0, step_s=0.0):
    board.page.device = "cpu"
    board.page.num_steps += num_steps
    board.page.num_samples += samples
    board.page.busy_s, board.page.step_s = busy_s, step_s


def test_rates_are_of_the_time_between_readings():
    board, clock = Board.create(0, 1), Clock()
    rows = Rows([Rank(0, Path("x"), psutil.Process(), board)], clock)

    assert shown(rows)[0]["samples/s"] == ""
    do_steps(board, 1, samples=10, busy_s=1.0, step_s=3.0)
    assert shown(rows)[0]["samples/s"] == "", "one step is not enough"
    clock.now_s += 2.0
    do_steps(board, 2, samples=20, busy_s=1.5, step_s=4.0)
    (row,) = shown(rows)

    expected = {"rank": "0", "stage": "0", "device": "cpu", "step": "3", "samples/s": "10"}
    assert (expected | {"busy": "25%", "bubble": "25%"}).items() <= row.items()
    assert row["memory"].endswith("iB")
    clock.now_s += 1.0  # within the next step: the rates stay those of whole steps
    assert shown(rows)[0]["samples/s"] == "10"
    board = rows.ranks[0].board = Board.create(0, 1)  # of another Stage
    do_steps(board, 2, samples=10)
    assert shown(rows)[0]["samples/s"] == ""
