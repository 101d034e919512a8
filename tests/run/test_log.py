"""Timed tasks, their sums, and the table of all stages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from procpipe.job.board import Board
from procpipe.plan.task import Task
from procpipe.run.log import Log
from procpipe.run.order import Order
from procpipe.run.statistics import StageStatistics
from procpipe.timeline.report import statistics_of, with_splits
from procpipe.timeline.text import table

ORDER = Order("step")


@pytest.fixture
def log():
    board = Board.create(0, 1)
    yield Log(board, torch.device("cpu"))
    board.close()


def statistics(**fields):
    values: dict[str, Any] = {
        "stage": 0,
        "num_steps": 2,
        "num_tasks": {"F": 8, "B": 8, "R": 6},
        "busy_s": 3.0,
        "waiting_s": 0.5,
        "step_s": 4.0,
        "sent_bytes": {"activation": 1 << 20, "target": 1 << 19},
        "num_messages": {"activation": 8, "target": 8},
    }
    return StageStatistics(**(values | fields))


def test_a_failed_step_is_not_counted(log):
    log.begin_step(ORDER)
    log.of_task(Task("F", 0, 0), lambda: None)()
    log.begin_step(ORDER)
    log.end_step(ORDER)

    assert (log.num_steps, log.busy_ns, dict(log.num_tasks)) == (1, 0, {})


def test_statistics_before_the_first_step_have_no_split(log):
    report = {"statistics": asdict(statistics()), "step": log.last_record(), "clock": ["a", 0]}

    assert statistics_of(with_splits([report])[0]) == statistics()


def test_the_table_has_a_line_a_stage():
    text = table([statistics(), statistics(stage=1, num_tasks={}, step_s=0.0)])

    assert text.splitlines() == [
        "stage  steps  F  R  B  busy s  waiting s   idle  sent MiB  messages",
        "    0      2  8  6  8    3.00       0.50  25.0%      1.50        16",
        "    1      2  0  0  0    3.00       0.50   0.0%      1.50        16",
    ]
