"""The benchmark of sums over replicas: the share that is hidden, from the times of its rounds."""

from __future__ import annotations

import pytest

from benchmarks.replicas import _AFTER, _BESIDE, _FREE, hidden, tabulate


def test_the_hidden_share_is_of_the_time_that_sums_after_the_step_take():
    times = {_FREE: [1.0, 1.0, 2.0], _BESIDE: [1.1, 1.2, 2.1], _AFTER: [1.5, 1.4, 2.4]}
    assert hidden(times) == pytest.approx(0.75)  # of 0.8, 0.5 and 0.75
    (row,) = tabulate({"gpipe, 8 layers": times}, 10.0, 5.0).rows
    assert row == ["gpipe, 8 layers", 1000, 1200, 1500, pytest.approx(0.75)]
