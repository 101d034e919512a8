"""Interleaved 1F1B: its figure, any number of micro-batches, and a shorter bubble."""

from __future__ import annotations

import pytest

from procpipe.plan.schedules.interleaved import interleaved
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from tests.cases import for_each
from tests.plan.schedules.grids import SIZES, grid, read


def test_the_figure() -> None:
    assert grid(interleaved(4, 2, 2)) == read("""
        F0@0  --
        F1@0  F0@1
        F0@2  F1@1
        F1@2  F0@3
        F2@0  B0@3
        B0@2  F1@3
        F3@0  B1@3
        B1@2  F2@1
        F2@2  B0@1
        B0@0  F3@1
        F3@2  B1@1
        B1@0  F2@3
        --    B2@3
        B2@2  F3@3
        --    B3@3
        B3@2  B2@1
        B2@0  B3@1
        B3@0  --
    """)


def test_with_one_partition_a_stage_it_is_one_forward_one_backward() -> None:
    assert interleaved(5, 3, 1, recompute={1}) == one_f_one_b(5, 3, recompute={1})


@for_each(("m", "n"), SIZES)
@for_each("v", [2, 3, 4])
def test_a_plan_takes_the_time_of_its_longest_stage_or_path(m: int, n: int, v: int) -> None:
    """With enough micro-batches the bubble is (n-1)(F+B)/v, as published."""
    costs = Costs.uniform(v * n, forward_s=1.0 / v, backward_s=2.0 / v)
    total_s = simulate(interleaved(m, n, v), costs).total_s
    longest_stage_s = 3.0 * m + 3.0 * (n - 1) / v
    longest_path_s = 3.0 * (v * n + m - 1) / v
    assert total_s == pytest.approx(max(longest_stage_s, longest_path_s))
    assert m < n or total_s == pytest.approx(longest_stage_s)


@for_each("v", [2, 3, 4])
def test_a_stage_holds_the_micro_batches_of_its_warm_up(v: int) -> None:
    """Stage j holds 2(n-1-j) + (v-1)g + 1 partitions' micro-batches, of groups of g."""
    for n in range(1, 5):
        costs = Costs.uniform(v * n, kept_bytes=1)
        for m in range(2 * n, 4 * n + 1):
            g = -(-m // (m // n))
            plan = interleaved(m, n, v)
            expected = [2 * (n - 1 - j) + (v - 1) * g + 1 for j in range(n)]
            found = [*map(simulate(plan, costs).peak_bytes, range(n))]
            assert found == expected, (m, n)
