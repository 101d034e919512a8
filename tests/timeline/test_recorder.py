"""The record of a step on a traced stage."""

from __future__ import annotations

import json
import time

import pytest
import torch

from procpipe.job.board import Board
from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.order import Order
from procpipe.timeline.chrome import read
from procpipe.timeline.recorder import Recorder
from tests.dist.devices import is_emulated
from tests.held import hold_for
from tests.timeline.recordings import FACTS

CPU = torch.device("cpu")
PLACES = ["layer 'a' (Identity)", "layer 'b' (Identity)"]
TENSORS = [torch.zeros(3, dtype=torch.float64)]
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


def run(recorder, task):
    recorder.begin_layers(task)
    recorder.end_task(task)


def recorded_step(recorder):
    page = recorder.board_for(PLACES).page
    recorder.begin_step(ORDER)
    for i in range(2):
        begun_ns = time.perf_counter_ns()
        recorder.took(Transfer("activation", i, 2, 3), TENSORS, begun_ns)
        task = Task("F", i, 3)
        recorder.begin_layers(task)
        for place in (*PLACES, ""):
            page.layer = place
        recorder.end_task(task)
        recorder.sent(Transfer("activation", i, 3, 4), TENSORS, time.perf_counter_ns())
    run(recorder, Task("B", 1, 3))
    recorder.end_step(ORDER)
    return recorder.last_record()


def test_waits_messages_and_layers_are_kept_with_their_times(recorder_on):
    recorder = recorder_on(CPU)
    record = recorded_step(recorder)

    assert [row[:3] for row in record["tasks"]] == [["F", 0, 3], ["F", 1, 3], ["B", 1, 3]]
    assert [row[:5] for row in record["takes"]] == [
        ["activation", 0, 2, 3, 24], ["activation", 1, 2, 3, 24],
    ]  # fmt: skip
    assert [row[:5] for row in record["sends"]] == [
        ["activation", 0, 3, 4, 24], ["activation", 1, 3, 4, 24],
    ]  # fmt: skip
    # Wait, task and message follow each other.
    times = []
    for take, task, send in zip(record["takes"], record["tasks"], record["sends"], strict=False):
        times += [*take[5:], *task[3:], *send[5:]]
    assert times == sorted(times)
    assert times[0] >= record["begin"]
    assert record["end"] >= times[-1]
    assert [(j, index, count) for j, index, _, count in record["layers"]] == [(3, 0, 2), (3, 1, 2)]
    assert 0 < recorder.waiting_ns


def test_a_step_has_no_records_of_the_step_before(recorder_on):
    recorder = recorder_on(CPU)
    recorded_step(recorder)
    record = recorded_step(recorder)

    assert record["step"] == 1
    assert (len(record["tasks"]), len(record["takes"]), len(record["sends"])) == (3, 2, 2)
    assert [count for *_, count in record["layers"]] == [2, 2]


def test_a_step_is_in_the_file_once_it_has_ended(recorder_on, tmp_path):
    recorder = recorder_on(CPU)
    record = json.loads(json.dumps(recorded_step(recorder)))
    recorder.begin_step(ORDER)
    run(recorder, Task("F", 0, 3))  # and the step fails

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
def test_on_a_gpu_tasks_have_the_device_s_times(recorder_on):
    device = torch.device("cuda")
    recorder = recorder_on(device)
    size = 256 if is_emulated() else 2048
    matrix = torch.randn(size, size, device=device)
    matrix @ matrix  # the first product on a GPU takes longer: its kernel is loaded
    recorder.begin_step(ORDER)
    for i in range(2):
        recorder.begin_layers(Task("F", i, 0))
        for _ in range(50):
            matrix @ matrix
        recorder.end_task(Task("F", i, 0))
    recorder.end_step(ORDER)
    (*_, start_0, end_0), (*_, start_1, end_1) = recorder.last_record()["tasks"]

    assert start_0 < end_0 <= start_1 < end_1
    # A stream of an emulated GPU is a thread, which waits before each operation for as long as the
    # seed says, and shares the cores with other processes: equal work does not take equal times.
    if not is_emulated():
        assert (end_1 - start_1) / (end_0 - start_0) == pytest.approx(1, abs=0.5)
    assert end_1 - start_1 > 1e5  # no GPU computes 50 products of 17 GFLOP in 0.1 ms


@pytest.mark.gpu
def test_on_a_gpu_a_task_lasts_as_long_as_its_stream_waits(recorder_on):
    """The host is far ahead then; the wait of a stream takes the same time on any GPU."""
    device = torch.device("cuda")
    stream, recorder = torch.cuda.current_stream(device), recorder_on(device)
    held_s = (0.1, 0.3)
    recorder.begin_step(ORDER)
    for i in range(2):
        recorder.begin_layers(Task("F", i, 0))
        hold_for(stream, held_s[i])
        recorder.end_task(Task("F", i, 0))
    recorder.end_step(ORDER)

    for (*_, start, end), least_s in zip(recorder.last_record()["tasks"], held_s, strict=True):
        assert end - start >= least_s * 1e9
