"""Fill and drain: the triangles of torchgpipe, and the recomputations between them."""

from __future__ import annotations

from procpipe.plan.schedules.gpipe import clock_cycles, gpipe, recomputed
from tests.plan.schedules.grids import grid, read


def test_forward_is_a_triangle_that_fills_and_drains() -> None:
    assert [[(i, j) for _, i, j in cycle] for cycle in clock_cycles(4, 3)] == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(3, 0), (2, 1), (1, 2)],
        [(3, 1), (2, 2)],
        [(3, 2)],
    ]


def test_except_last_recomputes_in_the_cycle_before_backward() -> None:
    assert grid(gpipe(3, 3, recompute=recomputed("except_last", 3))) == read("""
        F0  --  --
        F1  F0  --
        F2  F1  F0
        --  F2  F1
        --  --  F2
        --  --  B2
        --  B2  R1
        B2  R1  B1
        R1  B1  R0
        B1  R0  B0
        R0  B0  --
        B0  --  --
    """)


def test_the_modes_choose_what_to_recompute() -> None:
    assert recomputed("always", 3) == {0, 1, 2}
    assert recomputed("except_last", 3) == {0, 1}
    assert recomputed("never", 3) == frozenset()
    assert recomputed("except_last", 1) == frozenset()
