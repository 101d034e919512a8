"""A process's board, read by another process of the host while the writer runs, or has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from procpipe.job import board as board_module
from procpipe.job.board import Board

pytestmark = pytest.mark.dist

#: Runs each line of code from its input, a JSON string, and prints the variable `answer`. It loads
#: one file, not procpipe, so that it starts fast.
WRITER = """
import importlib.util, json, os, signal, sys
spec = importlib.util.spec_from_file_location("board", sys.argv[1])
board_module = sys.modules["board"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(board_module)
Board = board_module.Board
for line in sys.stdin:
    answer = None
    exec(json.loads(line))
    print(json.dumps(answer), flush=True)
"""


class Writer:
    """A process that runs given code."""

    def __init__(self):
        command = [sys.executable, "-S", "-c", WRITER, str(Path(board_module.__file__))]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def run(self, code):
        self.start(code)
        return json.loads(self._process.stdout.readline())

    def start(self, code):
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def end(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def board_of(writer):
    board = Board.of_process(writer.pid)
    assert board is not None
    return board


@pytest.fixture
def writer():
    process = Writer()
    yield process
    process.end()


def test_another_process_reads_what_is_written(writer):
    writer.run(
        "board = Board.create(2, 4); board.write_facts({'device': 'cpu', 'layers': ['a', 'b']})"
    )
    board = board_of(writer)
    new = board.read()
    writer.run("board.start_call('step'); board.page.num_micro_batches = 8")
    in_step = board.read()
    writer.run("board.start_task('F', 3); board.page.layer_index = 1; board.page.device_bytes = 5")
    in_layer = board.read()
    writer.run("import time; board.start_wait('activation 3', time.monotonic_ns() - 2 * 10**9)")
    waiting = board.read()
    writer.run("board.end_wait(); board.page.letter = 0; board.end_call()")
    writer.run("board.page.busy_s = 3; board.page.num_steps = 1; board.fail()")
    done = board.read()

    assert (new.pid, new.rank, new.num_ranks) == (writer.pid, 2, 4)
    assert new.facts == {"device": "cpu", "layers": ["a", "b"]}
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


def test_a_reader_keeps_what_a_killed_process_wrote_last(writer):
    writer.run("board = Board.create(0, 1); board.start_call('step'); board.start_task('B', 5)")
    board = board_of(writer)

    writer.end()

    assert (board.read().call, board.read().task) == ("step", "B5")
    assert Board.of_process(writer.pid) is None


def test_a_stopped_process_can_be_read(writer):
    writer.run("board = Board.create(0, 1); board.start_task('R', 2)")
    os.kill(writer.pid, signal.SIGSTOP)

    assert board_of(writer).read().task == "R2"


def test_a_forked_child_does_not_have_its_parents_board(writer):
    """A loader's worker has its parent's board open."""
    child = writer.run(
        "board = Board.create(0, 1)\n"
        "answer = os.fork()\n"
        "if answer == 0:\n"
        "    os.close(1)\n"
        "    signal.pause()"
    )
    try:
        assert Board.of_process(child) is None
        assert Board.of_process(writer.pid) is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_newest_board_is_read(writer):
    writer.run("boards = [Board.create(0, 1) for _ in range(3)]; boards[1].start_call('step')")

    assert board_of(writer).read().call == "step"


def test_a_process_without_a_board(writer):
    assert Board.of_process(writer.pid) is None
    assert Board.of_process(2**22 + 1) is None


@pytest.mark.parametrize("content", ["b''", "b'x' * 4096", "bytes(board_module._SIZE_BYTES)"])
def test_a_file_of_that_name_with_other_content_is_no_board(writer, content):
    writer.run(f"os.write(os.memfd_create('procpipe-board'), {content})")

    assert Board.of_process(writer.pid) is None


def test_texts_that_are_too_long_are_cut_at_a_character(writer):
    writer.run("board = Board.create(0, 1); board.start_call('x' + 'ä' * 1000)")
    writer.run("board.start_wait('ä' * 1000 + 'x', 1)")

    reading = board_of(writer).read()

    assert reading.waits_for == "ä" * 320
    assert reading.call == "x" + "ä" * 63


def test_facts_that_are_too_long_lose_the_layers(writer):
    writer.run(
        "board = Board.create(0, 1)\n"
        "board.write_facts({'layers': ['ä' * 100] * 10_000, 'device': 'cpu', 'shards': [0, 1]})\n"
        "board.page.layer_index = 3"
    )

    reading = board_of(writer).read()

    assert reading.facts == {"device": "cpu", "layers": [], "shards": [0, 1]}
    assert reading.layer == ""


def test_a_closed_board_keeps_its_content_for_its_process():
    board = Board.create(0, 1)
    board.write_facts({"device": "cpu"})
    board.start_call("step")
    num_open = len(os.listdir("/proc/self/fd"))

    board.close()

    assert (board.read().call, board.read().facts) == ("step", {"device": "cpu"})
    board.end_call()
    assert board.read().call == ""
    assert len(os.listdir("/proc/self/fd")) == num_open - 2  # its own, and that of mmap
