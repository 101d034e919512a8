"""The predicted curve, where it is known in closed form."""

from __future__ import annotations

import pytest

from benchmarks.scaling import (
    Measured,
    predict,
    tabulate_check,
    tabulate_costs,
    tabulate_curve,
    task_s,
)
from procpipe import TimedTask
from procpipe.plan.task import Task
from tests.cases import for_each

FREE = Measured(forward_s=1.0, backward_s=2.0, host_s=0.0, transfer_s=0.0)
COSTLY = Measured(forward_s=1.0, backward_s=2.0, host_s=0.0, transfer_s=0.5)


@for_each("m", [1, 4, 32])
@for_each("n", [1, 2, 7, 64])
def test_without_transfers_only_the_bubble_costs(m, n):
    point = predict(FREE, m, n)

    assert point.throughput / n == pytest.approx(m / (m + n - 1))
    assert point.bubble == pytest.approx((n - 1) / (m + n - 1))
    assert point.step_s == pytest.approx(3.0 * (m + n - 1))


def test_transfers_delay_what_fills_and_drains():
    assert predict(COSTLY, 4, 1).step_s == 12.0
    assert predict(COSTLY, 4, 3).step_s == 3.0 * 6 + 2 * 2 * 0.5


def test_verifying_millions_of_tasks_is_left_out(monkeypatch):
    monkeypatch.setattr("benchmarks.scaling._MAX_TASKS_TO_VERIFY", 100)

    assert predict(FREE, 10, 5).verify_s is not None
    assert predict(FREE, 10, 6).verify_s is None


def test_tables():
    curve = [predict(COSTLY, 4, n) for n in (1, 2)]

    text = tabulate_curve("m = 4", curve).to_text()
    assert "1.00       1.000" in text
    slow = Measured(forward_s=2.0, backward_s=4.0, host_s=0.0, transfer_s=0.0)
    check = tabulate_check({1: slow, 2: COSTLY}, {1: {"4": [24.0, 24.0, 90.0]}, 2: {"4": [8.0]}})
    assert check.rows[0] == ["n = 1, m = 4", 24e3, 24e3, 1.0]
    assert check.rows[1] == ["n = 2, m = 4", 8e3, 16e3, 0.5]
    costs = tabulate_costs({1: FREE, 2: COSTLY})
    assert costs.rows[1] == ["backward task", 2000.0, 2000.0]
    assert costs.rows[3] == ["transfer to the next stage", 0.0, 500.0]


def test_the_cost_of_a_task_is_the_mean_within_a_step_and_the_median_of_steps():
    def step(*ends_s):
        forward = [TimedTask(Task("F", i, 0), 1.0, end_s) for i, end_s in enumerate(ends_s)]
        return [*forward, TimedTask(Task("B", 0, 0), 0.0, 50.0)]

    steps = [step(2.0, 4.0), step(2.0, 3.0), step(90.0, 90.0)]

    assert task_s(steps, "F") == 2.0
    assert task_s(steps, "B") == 50.0
