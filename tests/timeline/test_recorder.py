"""The record of a step on a traced stage."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from procpipe.job.board import Board
from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.order import Order
from procpipe.timeline.chrome import read
from procpipe.timeline.recorder import Recorder
from procpipe.tree import Flat
from tests.held import hold_for
from tests.timeline.recordings import FACTS

CPU = torch.device("cpu")
MESSAGE = Flat.of(torch.zeros(3, dtype=torch.float64))
ORDER = Order("step", plan="abc", sizes=(4, 4))


@pytest.fixture
def recorder_on(tmp_path):
    """Return a function that makes the recorder of a stage."""
    boards = []

    def make(device):
        boards.append(Board.create(0, 1))
        recorder = Recorder(tmp_path / "run.0.json", 0, FACTS, boards[-1], device)
        recorder.connected(run=1)
        return recorder

    yield make
    for board in boards:
        board.close()


def recorded_step(recorder):
    recorder.begin_step(ORDER)
    for i in range(2):
        recorder.of_take(Transfer("activation", i, 2, 3), lambda: MESSAGE)()
        recorder.of_task(Task("F", i, 3), lambda: None)()
        recorder.of_send(Transfer("activation", i, 3, 4), lambda message: None)(MESSAGE)
    recorder.of_task(Task("B", 1, 3), lambda: None)()
    recorder.end_step(ORDER)
    return recorder.last_record()


def test_a_step_is_in_the_file_once_it_has_ended(recorder_on, tmp_path):
    recorder = recorder_on(CPU)
    record = json.loads(json.dumps(recorded_step(recorder)))
    recorder.begin_step(ORDER)
    recorder.of_task(Task("F", 0, 3), lambda: None)()  # and the step fails

    (found,) = read(tmp_path / "run.0.json").records
    assert found == record | {"call": "step", "plan": "abc", "sizes": [4, 4]}
    recorder.finish()
    assert read(tmp_path / "run.0.json").is_closed


def test_tasks_are_named_in_torch_s_profile_at_the_same_times(recorder_on, tmp_path):
    recorder = recorder_on(CPU)
    recorded_step(recorder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        recorded_step(recorder)
    recorded_step(recorder)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    theirs, ours = (
        json.loads((tmp_path / name).read_text()) for name in ("profile.json", "run.0.json")
    )

    assert theirs["baseTimeNanoseconds"] == ours["baseTimeNanoseconds"]
    named = {e["name"]: e for e in theirs["traceEvents"] if "@" in e.get("name", "")}
    assert named.keys() == {"F0@3", "F1@3", "B1@3"}
    second = [e for e in ours["traceEvents"] if e["ph"] == "X" and "@" in e["name"]][3:6]
    for event in second:
        same = named[event["name"]]
        assert same["ts"] - 500 < event["ts"]
        assert event["ts"] + event["dur"] < same["ts"] + same["dur"] + 500


@pytest.mark.gpu
def test_on_a_gpu_a_task_lasts_as_long_as_its_stream_waits(recorder_on):
    """The host is far ahead then; the wait of a stream takes the same time on any GPU."""
    device = torch.device("cuda")
    stream, recorder = torch.cuda.current_stream(device), recorder_on(device)
    held_s = (0.1, 0.3)
    recorder.begin_step(ORDER)
    for i in range(2):
        recorder.of_task(Task("F", i, 0), partial(hold_for, stream, held_s[i]))()
    recorder.end_step(ORDER)

    for (*_, start, end), least_s in zip(recorder.last_record()["tasks"], held_s, strict=True):
        assert end - start >= least_s * 1e9
