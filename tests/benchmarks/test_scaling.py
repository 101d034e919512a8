"""The predicted curve, where it is known in closed form."""

from __future__ import annotations

import pytest

from benchmarks.scaling import (
    Measured,
    predict,
    tabulate_check,
    tabulate_costs,
    tabulate_curve,
)

FREE = Measured(forward_s=1.0, backward_s=2.0, host_s=0.0, transfer_s=0.0)
COSTLY = Measured(forward_s=1.0, backward_s=2.0, host_s=0.0, transfer_s=0.5)


@pytest.mark.parametrize("m", [1, 4, 32])
@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_without_transfers_only_the_bubble_costs(m, n):
    point = predict(FREE, m, n)

    assert point.throughput / n == pytest.approx(m / (m + n - 1))
    assert point.bubble == pytest.approx((n - 1) / (m + n - 1))
    assert point.step_s == pytest.approx(3.0 * (m + n - 1))


def test_transfers_delay_what_fills_and_drains():
    assert predict(COSTLY, 4, 1).step_s == 12.0
    assert predict(COSTLY, 4, 3).step_s == 3.0 * 6 + 2 * 2 * 0.5


def test_a_proof_of_millions_of_tasks_is_left_out(monkeypatch):
    monkeypatch.setattr("benchmarks.scaling._MAX_PROOF_TASKS", 100)

    assert predict(FREE, 10, 5).verify_s is not None
    assert predict(FREE, 10, 6).verify_s is None


def test_tables():
    curve = [predict(COSTLY, 4, n) for n in (1, 2)]

    text = tabulate_curve("m = 4", curve).to_text()
    assert "1.00       1.000" in text
    check = tabulate_check(COSTLY, {1: {"4": [12.0, 12.0, 90.0]}, 2: {"4": [8.0]}})
    assert check.rows[0] == ["n = 1, m = 4", 12e3, 12e3, 1.0]
    assert check.rows[1] == ["n = 2, m = 4", 8e3, 16e3, 0.5]
    assert "forward task" in tabulate_costs(COSTLY).to_text()
