"""Fill and drain: the triangles of torchgpipe, and the recomputations between them."""

from __future__ import annotations

import pytest

from procpipe.plan.schedules.gpipe import (
    backward_plan,
    clock_cycles,
    forward_plan,
    gpipe,
    recomputed,
)
from procpipe.plan.task import Task
from tests.cases import for_each
from tests.plan.schedules.grids import SIZES, grid, read

MODES = ["always", "except_last", "never"]


def test_forward_is_a_triangle_that_fills_and_drains() -> None:
    assert [[(i, j) for _, i, j in cycle] for cycle in clock_cycles(4, 3)] == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(3, 0), (2, 1), (1, 2)],
        [(3, 1), (2, 2)],
        [(3, 2)],
    ]


def test_one_micro_batch_passes_through_the_stages() -> None:
    assert grid(gpipe(1, 2)) == read("""
        F0  --
        --  F0
        --  B0
        B0  --
    """)


def test_one_stage_does_one_task_after_the_other() -> None:
    assert grid(gpipe(2, 1, recompute={0, 1})) == read("""
        F0
        F1
        R1
        B1
        R0
        B0
    """)


def test_without_recomputation_backward_mirrors_forward() -> None:
    assert grid(gpipe(3, 3)) == read("""
        F0  --  --
        F1  F0  --
        F2  F1  F0
        --  F2  F1
        --  --  F2
        --  --  B2
        --  B2  B1
        B2  B1  B0
        B1  B0  --
        B0  --  --
    """)


def test_except_last_recomputes_in_the_cycle_before_backward() -> None:
    assert grid(backward_plan(3, 3, recomputed("except_last", 3))) == read("""
        --  --  B2
        --  B2  R1
        B2  R1  B1
        R1  B1  R0
        B1  R0  B0
        R0  B0  --
        B0  --  --
    """)


def test_always_recomputes_the_last_too() -> None:
    assert grid(backward_plan(2, 3, recomputed("always", 2))) == read("""
        --  --  R1
        --  R1  B1
        R1  B1  R0
        B1  R0  B0
        R0  B0  --
        B0  --  --
    """)


@for_each(("m", "n"), SIZES)
def test_forward_cycle_k_holds_every_i_plus_j_equal_k(m: int, n: int) -> None:
    cycles = list(clock_cycles(m, n))
    assert len(cycles) == m + n - 1
    for k, cycle in enumerate(cycles):
        assert cycle == tuple(Task("F", k - j, j) for j in range(n) if 0 <= k - j < m)


@for_each("mode", MODES)
@for_each(("m", "n"), SIZES)
def test_backward_tasks_are_in_the_cycles_of_the_formula(m: int, n: int, mode: str) -> None:
    again = recomputed(mode, m)
    expected = set()
    for i in range(m):
        offset = sum(1 + (later in again) for later in range(i + 1, m))
        for j in range(n):
            d = n - 1 - j
            expected.add((offset + (i in again) + d, Task("B", i, j)))
            if i in again:
                expected.add((offset + d, Task("R", i, j)))
    cycles = backward_plan(m, n, again).cycles
    assert {(k, task) for k, cycle in enumerate(cycles) for task in cycle} == expected
    assert all(cycles), "a cycle without tasks"


@for_each(("m", "n"), SIZES)
def test_a_plan_is_forward_and_then_backward(m: int, n: int) -> None:
    again = recomputed("except_last", m)
    whole = gpipe(m, n, recompute=again)
    parts = [*forward_plan(m, n).cycles, *backward_plan(m, n, again).cycles]
    assert list(whole.cycles) == parts


def test_the_modes_choose_what_to_recompute() -> None:
    assert recomputed("always", 3) == {0, 1, 2}
    assert recomputed("except_last", 3) == {0, 1}
    assert recomputed("never", 3) == frozenset()
    assert recomputed("except_last", 1) == frozenset()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'often'; .* 'always', 'except_last', 'never'"):
        recomputed("often", 3)
