"""Rows of the live table and plain lines, from real boards."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
from rich.console import Console

from procpipe.job.board import Board
from procpipe.launch.run.ranks import Attempt, Rank
from procpipe.launch.run.rows import Row, RowReader, plain_line, summary
from procpipe.launch.run.table import _COLUMNS, live_table
from tests.cases import for_each


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def attempt_of(*boards):
    own = psutil.Process()
    return Attempt(len(boards), [Rank(k, Path("x"), own, board) for k, board in enumerate(boards)])


class Over:
    """A process that has ended."""

    def is_running(self):
        return False


def do_steps(board, num_steps, *, samples=0, busy_s=0.0, step_s=0.0):
    for _ in range(num_steps):
        board.page.num_micro_batches = 4
        board.start_task("F", 3)
        board.page.task = ""
        board.page.num_steps += samples > 0
        board.page.num_samples += samples
        board.page.busy_s, board.page.step_s = busy_s, step_s


def test_rates_are_of_the_time_between_readings():
    board, clock = Board.create(0, 1), Clock()
    board.page.device = "cpu"
    reader = RowReader(attempt_of(board), clock)

    assert reader.rows()[0].cells["samples/s"] == ""
    do_steps(board, 1, samples=10, busy_s=1.0, step_s=3.0)
    assert reader.rows()[0].cells["samples/s"] == "", "one step is not enough"
    clock.now_s += 2.0
    do_steps(board, 2, samples=10, busy_s=1.5, step_s=4.0)
    (row,) = reader.rows()

    shown = {"step": "3", "m-batch": "4/4", "device": "cpu", "samples/s": "10"}
    shown |= {"busy": "25%", "bubble": "25%"}
    assert shown.items() <= row.cells.items()
    clock.now_s += 1.0  # within the next step: the rates stay those of whole steps
    assert reader.rows()[0].cells["samples/s"] == "10"


def test_rates_are_of_the_last_seconds_only():
    board, clock = Board.create(0, 1), Clock()
    reader = RowReader(attempt_of(board), clock)
    for rate in (1000, 10):
        for _ in range(20):
            do_steps(board, 1, samples=rate)
            reader.rows()
            clock.now_s += 1.0

    assert reader.rows()[0].cells["samples/s"] == "10"


def test_a_row_shows_the_activity_of_a_stage():
    board, ended_board = Board.create(0, 2), Board.create(1, 2)
    board.page.device = "cpu"
    attempt = attempt_of(board, ended_board)
    attempt.ranks[1].process = Over()

    def now():
        return [row.now for row in RowReader(attempt).rows()]

    assert now() == ["user's code", "ended"]
    board.start_call("step")
    assert now()[0] == "step()"
    board.start_task("F", 3)
    board.page.layer = "layer 'conv' (Conv2d)"
    assert now()[0] == "F3 'conv' (Conv2d)"
    board.note_wait("gradient from stage 1 (rank 1)", 1)
    assert now()[0].endswith(" s for gradient from stage 1 (rank 1)")
    assert RowReader(attempt).rows()[0].is_stuck


def test_a_plain_line_has_the_rates_of_the_last_steps():
    board, clock = Board.create(0, 1), Clock()
    reader = RowReader(attempt_of(board), clock)
    assert plain_line(reader.rows(), "0:10") == "0:10: no rank has begun its first step yet"

    board.page.device = "cpu"
    do_steps(board, 1, samples=10)
    reader.rows()
    clock.now_s += 1.0
    do_steps(board, 1000, samples=10, busy_s=0.5, step_s=0.75)

    assert re.fullmatch(
        r"0:30: step 1,001, 10,000 samples/s, busy 50%, bubble 25%, memory [\d.]+ [MG]iB",
        plain_line(reader.rows(), "0:30"),
    )


def test_a_plain_line_after_a_rank_has_ended():
    boards = [Board.create(rank, 2) for rank in range(2)]
    for board in boards:
        board.page.device = "cpu"
    attempt = attempt_of(*boards)
    attempt.ranks[0].process = Over()

    line = plain_line(RowReader(attempt).rows(), "0:30")

    assert re.fullmatch(r"0:30: step 0, memory - [\d.]+ [MG]iB", line), line


@for_each("width", [120, 80, 60, 40])
def test_a_narrow_terminal_has_fewer_columns_and_none_is_cut(width):
    texts = "", "", "0", "cuda:0", "0-15,64-79", "12,345", "4/16", "12,345", "58%", "24%"
    cells = dict(zip(_COLUMNS, (*texts, "3.0 GiB", "20.0 GiB"), strict=True))
    row = Row("stage 0", "F3", True, cells=cells)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(live_table([row], width))
    shown = capture.get()

    assert "…" not in shown
    assert {"stage", "step", "samples/s", "now", "12,345", "F3"} <= set(shown.split())
    assert ("0-15,64-79" in shown) == (width == 120)


def test_replicas_are_blocks():
    boards = [Board.create(rank, 4) for rank in range(4)]
    for board in boards:
        board.page.num_replicas = 2
        board.page.device = "cpu"
    boards[2].note_wait("gradient from stage 1 of replica 1 (rank 3)", 1)
    rows = RowReader(attempt_of(*boards)).rows()

    assert [row.name for row in rows[1:3]] == ["stage 1 of replica 0", "stage 0 of replica 1"]
    console = Console(width=160)
    with console.capture() as capture:
        console.print(live_table(rows[1:], 160))  # of a host with the last three
    header, *lines = capture.get().splitlines()
    assert header.split()[:2] == ["replica", "stage"]
    assert [line[: header.index("device")].split() for line in lines] == [
        ["0", "1"], ["1", "0"], ["1"],
    ]  # fmt: skip
    size = r"[\d.]+ [MG]iB"  # of this process
    memory = rf"memory {size} {size} \| {size} {size}; stage 0 of replica 1 waits "
    assert re.search(memory, plain_line(rows, "0:30"))


def test_stages_of_several_pipelines_are_named_with_their_ranks():
    boards = [Board.create(rank, 2, place=rank % 2) for rank in range(4)]
    for board in boards:
        board.page.device = "cpu"
        do_steps(board, 1, samples=8, step_s=2.0)
    boards[2].note_wait("gradient from stage 1 (rank 3)", 1)
    attempt, clock = attempt_of(*boards), Clock()
    reader = RowReader(attempt, clock)
    reader.rows()
    clock.now_s += 2.0
    for board in boards:
        do_steps(board, 1, samples=8, step_s=2.0)
    rows = reader.rows()

    console = Console(width=160)
    with console.capture() as capture:
        console.print(live_table(rows, 160))
    header, *lines = capture.get().splitlines()
    assert header.split()[:2] == ["rank", "stage"]
    assert [line.split()[:2] for line in lines] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert lines[2].rstrip().endswith(" s for gradient from stage 1 (rank 3)")
    line = plain_line(rows, "0:30")
    assert line.startswith("0:30: step 2, 4 samples/s a pipeline, busy ")
    assert re.search(r"; stage 0 \(rank 2\) waits .* s for gradient from stage 1 \(rank 3\)$", line)
    assert summary(attempt) == "2 steps, 8 samples/s a pipeline in steps"


def test_a_summary_has_the_steps_and_their_rate():
    board = Board.create(0, 1)
    attempt = attempt_of(board)
    assert summary(attempt) == ""

    do_steps(board, 1, samples=10, step_s=4.0)

    assert summary(attempt) == "1 step, 2.5 samples/s in steps"
