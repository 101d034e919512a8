"""One forward, one backward: its figure, and less memory in the same time as fill and drain."""

from __future__ import annotations

import pytest

from procpipe.plan.schedules.gpipe import gpipe
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import BACKWARD, FORWARD, Task
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from tests.cases import for_each
from tests.plan.schedules.grids import SIZES, grid, read


def test_the_figure() -> None:
    assert grid(one_f_one_b(4, 3)) == read("""
        F0  --  --
        F1  F0  --
        F2  F1  F0
        --  --  B0
        --  B0  F1
        B0  F2  B1
        F3  B1  F2
        B1  F3  B2
        --  B2  F3
        B2  --  B3
        --  B3  --
        B3  --  --
    """)


def test_a_recomputation_is_right_before_its_backward() -> None:
    assert grid(one_f_one_b(2, 2, recompute={0, 1})) == read("""
        F0  --
        F1  F0
        R0  R0
        --  B0
        B0  F1
        R1  R1
        --  B1
        B1  --
    """)


@for_each(("m", "n"), SIZES)
def test_a_stage_holds_a_micro_batch_for_itself_and_each_later_stage(m: int, n: int) -> None:
    for j in range(n):
        held = most = 0
        for kind, _, _ in one_f_one_b(m, n).tasks_of(j):
            held += {FORWARD: 1, BACKWARD: -1}[kind]
            most = max(most, held)
        assert most == min(m, n - j)


@for_each(("m", "n"), SIZES)
def test_a_plan_takes_as_long_as_fill_and_drain(m: int, n: int) -> None:
    costs = Costs.uniform(n, forward_s=1.0, backward_s=2.0)
    total_s = simulate(one_f_one_b(m, n), costs).total_s
    assert total_s == simulate(gpipe(m, n), costs).total_s == 3.0 * (m + n - 1)


@for_each(
    ("rows", "fault"),
    [
        (["F0@1 B0@0", "F0@0 B0@1"], "F0@1 is in the row of stage 0; F0@0 is in the row of"),
        (["B0@0 F0@0", "F0@1 B0@1"], "stage 0 waits at B0@0, stage 1 waits at F0@1"),
    ],
)
def test_rows_that_are_no_plan_are_reported(rows: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        plan_of_rows(1, [[*map(Task.parse, row.split())] for row in rows])
