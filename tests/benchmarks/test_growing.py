"""How the growth, boundary, start and memory parts read their figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import boundary, growth, memory, start
from benchmarks.memory import Use
from benchmarks.workloads import WORKLOADS, Job

MIB = 1 << 20


def test_growth_divides_by_the_tasks_of_a_stage_and_of_all():
    seconds = {"procpipe": [0.032], "torch GPipe": [0.064], "one process": [0.016]}
    cost = growth.Cost(m=8, n=2, wall=seconds, cpu=seconds)

    (row,) = growth.tabulate("m", [cost]).rows

    assert row[0] == "8"
    assert row[1:] == pytest.approx([2000, 4000, 1000, 0.5, 1000, 2000, 500, 0.5])
    assert growth.tabulate("n", [cost]).rows[0][0] == "2"
    assert "m = 8" in growth.tabulate("n", [cost]).title


def test_boundary_counts_messages_both_ways():
    times = {"procpipe": [0.008, 0.008, 0.1], "torch GPipe": [0.016, 0.016, 0.2]}

    assert boundary.seconds_a_message(times, m=4) == {"procpipe": 0.001, "torch GPipe": 0.002}
    (row,) = boundary.tabulate_sizes({1024: times}).rows
    assert row[0] == "1 MiB"
    assert row[1:] == pytest.approx([1000, 2000, 0.5])
    (row,) = boundary.tabulate_rates({1024: times}).rows
    assert row[1:] == pytest.approx([1.048576, 0.524288])


@pytest.mark.parametrize(("kib", "text"), [(1, "1 KiB"), (256, "256 KiB"), (1536, "1.5 MiB")])
def test_sizes_as_text(kib, text):
    assert boundary.size_text(kib) == text


def test_layers_that_do_nothing_train():
    (x,) = (job := boundary._job("size", _two_that_pass, 8, 1)).input.chunk(1)
    model = job.model()

    job.workload.loss_fn(model(x), job.target).backward()

    assert model(x).equal(x)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("number", [1, 3])
def test_a_tuple_crosses_as_one_value_or_one_by_one(number):
    fan, join = boundary.Fan(number), boundary.Join()
    x = torch.rand(1, number * 64)

    assert len(fan(x)) == number
    assert join(fan(x)).equal(join(*fan(x)))
    assert join(fan(x)).equal(x)


def test_start_counts_each_part_from_the_point_before():
    points = ("process", "torch", "library", "built", "first step", "second step", "end")
    launches = [
        {point: place * seconds for place, point in enumerate(points, 1)} for seconds in (1, 2, 9)
    ]

    assert start.parts_s(launches) == dict.fromkeys(points, 2)
    table = start.tabulate(2, {"procpipe": launches, "bare gloo": launches})
    assert table.rows[0] == ["procpipe", 10, 5, 45, 1.0, *[2] * 6]
    assert table.to_text()


def uses(pipeline, *, whole, by_micro_batches, one_stage):
    return {
        "procpipe always": [Use(mib * MIB, 4 * MIB) for mib in pipeline],
        "one process, whole mini-batch": [Use(whole * MIB, 0)],
        "one process, by micro-batches": [Use(by_micro_batches * MIB, 0)],
        "procpipe always, one stage": [Use(one_stage * MIB, 0)],
    }


def test_the_table_of_memory():
    job = Job(WORKLOADS["tiny"], 2, 8)
    found = uses([20, 30], whole=100, by_micro_batches=60, one_stage=50)

    table = memory.tabulate(job, found, {"torch ZBV": "not here"})

    assert table.rows[0] == ["procpipe always", 20, 30, 46, 4, 0.3, 0.5]
    assert table.rows[1][1:5] == [100, None, 100, 0]
    assert table.notes[-1] == "not run: torch ZBV: not here"
    assert table.to_text()


def test_a_limit_that_only_the_pipeline_keeps_to():
    found = uses([20, 30], whole=100, by_micro_batches=60, one_stage=50)

    assert memory.limit_between(found) == 40 * MIB
    refused = {"procpipe always": [Use(1, 0)] * 2, "one": [Use(0, 0, refused="cannot: 4 bytes")]}
    table = memory.tabulate_limit(40 * MIB, refused)
    assert table.rows == [["procpipe always", 2, "trains"], ["one", 1, "cannot: 4 bytes"]]
    assert "40 MiB" in table.to_text()


def test_no_limit_where_one_process_needs_no_more():
    found = uses([20, 60], whole=100, by_micro_batches=60, one_stage=70)

    assert memory.limit_between(found) is None
    assert "not run" in memory.tabulate_limit(None, {}).to_text()


def test_memory_is_read_and_its_peak_is_reset():
    before = memory.counted_memory()
    taken = bytearray(32 * MIB)
    peak = memory.counted_memory()["VmHWM"]
    del taken
    memory.reset_peak()

    assert peak >= before["VmRSS"] + 31 * MIB
    assert memory.counted_memory()["VmHWM"] < peak - 16 * MIB


def _two_that_pass():
    return nn.Sequential(boundary.Pass(), boundary.Pass())
