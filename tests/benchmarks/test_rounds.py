"""What is compared: ratios within a round, of contenders that take turns."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks.rounds import measure, ratio, spread


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    drifting, other = [1.0, 2.0, 9.0], [2.0, 4.0, 3.0]

    assert ratio(drifting, other) == 0.5  # the medians' own ratio is 2/3
    assert spread(drifting, other) == "0.50 (0.50-3.00)"


def test_contenders_take_turns_and_the_first_round_does_not_count(alone):
    called = []
    steps = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}

    times = measure(steps, num_rounds=2, num_steps=2)

    assert called == ["a", "a", "b", "b"] * 3
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    assert min(times["a"]) > 0
