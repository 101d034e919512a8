"""The record of a step on a traced stage."""

from __future__ import annotations

import time

import pytest
import torch

from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.messages import Order
from procpipe.run.observer import Observer, Observers
from procpipe.run.trace import Trace
from procpipe.timeline.recorder import Recorder
from tests.dist.devices import is_emulated
from tests.held import hold_for

TENSORS = [torch.zeros(3, dtype=torch.float64)]
ORDER = Order("step")


class Layers(Observer):
    """Records which layers are entered."""

    def __init__(self, entered):
        self.hook = entered.append

    def on_layer(self, j):
        return self.hook


def run(observer, task):
    observer.begin_layers(task)
    observer.end_task(task)


def recorded_step(recorder, entered):
    enter = Observers([Layers(entered), recorder]).on_layer(3)
    recorder.begin_step(ORDER)
    for i in range(2):
        begun_ns = time.perf_counter_ns()
        recorder.waited(Transfer("activation", i, 2, 3), TENSORS, begun_ns)
        task = Task("F", i, 3)
        recorder.begin_layers(task)
        for index in (0, 1, -1):
            enter(index)
        recorder.end_task(task)
        recorder.sent(Transfer("activation", i, 3, 4), TENSORS, time.perf_counter_ns())
    run(recorder, Task("B", 1, 3))
    recorder.end_step(ORDER)
    return recorder.last_record()


def test_waits_messages_and_layers_are_kept_with_their_times():
    entered: list[int] = []
    recorder = Recorder(torch.device("cpu"))
    record = recorded_step(recorder, entered)

    assert entered == [0, 1, -1, 0, 1, -1]
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


def test_a_step_has_no_records_of_the_step_before():
    recorder = Recorder(torch.device("cpu"))
    recorded_step(recorder, [])
    record = recorded_step(recorder, [])

    assert record["step"] == 1
    assert (len(record["tasks"]), len(record["takes"]), len(record["sends"])) == (3, 2, 2)
    assert [count for *_, count in record["layers"]] == [2, 2]


def test_events_that_no_observer_follows_have_no_calls():
    entered: list[int] = []
    layers = Layers(entered)
    trace = Trace()
    observers = Observers([trace, layers])

    assert observers.on_layer(0) == layers.hook
    assert (observers.sent, observers.begin_task) == ((), ())
    assert (observers.begin_layers, observers.waited) == (trace.begin_layers, trace.waited)


@pytest.mark.gpu
def test_on_a_gpu_tasks_have_the_device_s_times():
    device = torch.device("cuda")
    recorder = Recorder(device)
    size = 256 if is_emulated() else 2048
    matrix = torch.randn(size, size, device=device)
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
def test_on_a_gpu_a_task_lasts_as_long_as_its_stream_waits():
    """The host is far ahead then; the wait of a stream takes the same time on any GPU."""
    device = torch.device("cuda")
    stream, recorder = torch.cuda.current_stream(device), Recorder(device)
    held_s = (0.1, 0.3)
    recorder.begin_step(ORDER)
    for i in range(2):
        recorder.begin_layers(Task("F", i, 0))
        hold_for(stream, held_s[i])
        recorder.end_task(Task("F", i, 0))
    recorder.end_step(ORDER)

    for (*_, start, end), least_s in zip(recorder.last_record()["tasks"], held_s, strict=True):
        assert end - start >= least_s * 1e9
