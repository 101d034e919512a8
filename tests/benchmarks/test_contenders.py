"""Which contender can do which job, and the limit that their times are compared with."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.contenders import CONTENDERS, COPIES, ONE_PROCESS, PROCPIPE, limit_s
from benchmarks.throughput import tabulate
from benchmarks.workloads import WORKLOADS, Job
from tests.cases import for_each


@for_each(
    ("m", "n", "is_bubble_free", "expected_s"),
    [
        (8, 2, False, 5.0 * 9 / 8),
        (8, 2, True, 5.0),
        (1, 1, False, 10.0),
        (1, 4, False, 10.0),  # one micro-batch: no two stages work at once
    ],
)
def test_the_limit_of_a_pipeline(m, n, is_bubble_free, expected_s):
    assert limit_s(10.0, m, n, is_bubble_free=is_bubble_free) == pytest.approx(expected_s)


def test_no_pipeline_of_many_stages_beats_its_share_of_the_machine():
    limits_s = [limit_s(1.0, m, 4) for m in (1, 2, 8, 64, 4096)]

    assert limits_s == sorted(limits_s, reverse=True)
    assert limits_s[-1] == pytest.approx(1 / 4, rel=1e-3)


def test_a_contender_that_cannot_do_a_job_has_a_reason():
    unet, tiny = (Job(WORKLOADS[name], 2, 8) for name in ("unet", "tiny"))

    refused = {name for name, contender in CONTENDERS.items() if contender.why_not(unet)}
    assert refused - {"torchgpipe"} == {"torch Interleaved1F1B", "torch ZBV", "bare gloo"}
    assert {name for name, contender in CONTENDERS.items() if contender.why_not(tiny)} <= {
        "torchgpipe"
    }


def test_the_table_of_throughput():
    job = Job(dataclasses.replace(WORKLOADS["tiny"], sizes="small"), 2, 8)
    times = {
        PROCPIPE: [0.006, 0.006, 0.012],
        "torch ZBV": [0.005, 0.005, 0.010],
        ONE_PROCESS: [0.010, 0.010, 0.020],
        COPIES: [0.0096, 0.0096, 0.0192],
    }

    table = tabulate(job, times, {"bare gloo": "not here", PROCPIPE: None}, [3, 5])

    rows = {row[0]: row[1:] for row in table.rows}
    assert rows[PROCPIPE][:4] == pytest.approx([6.0, 6.0, 12.0, 10 / 6])
    assert rows[PROCPIPE][4] == "0.90 (0.90-0.90)"  # 4.8 * 9 / 8 of 6
    assert rows["torch ZBV"][:4] == pytest.approx([5.0, 5.0, 10.0, 2.0])
    assert rows["torch ZBV"][4] == "0.96 (0.96-0.96)"  # 4.8 of 5: no bubble
    assert rows[ONE_PROCESS][:4] == pytest.approx([10.0, 10.0, 20.0, 1.0])
    assert rows[ONE_PROCESS][4] is None  # it is no pipeline
    assert rows[COPIES][3:] == [None, None]
    assert rows["limit"][0] == pytest.approx(4.8 * 9 / 8)
    assert rows["limit without a bubble"][3] == pytest.approx(10 / 4.8)
    assert table.notes[0] == "balance: [3, 5]"
    assert table.notes[-1] == "not run: bare gloo: not here"
    assert table.to_text()


def test_layers_of_equal_cost_are_shared_out_evenly():
    job = Job(WORKLOADS["tiny"], 3, 4)

    assert job.balance(3) == [3, 3, 2]
    assert [len(x) for x, _ in job.micro_batches()] == [4] * 4
    assert job.input.equal(Job(WORKLOADS["tiny"], 2, 4).input)  # the same on every rank
