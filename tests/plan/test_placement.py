"""Which stage runs which partition."""

from __future__ import annotations

import pytest

from procpipe.errors import BalanceError, PlanError
from procpipe.plan.placement import folded, looped, partitions_of
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe
from procpipe.plan.schedules.named import SCHEDULES, schedule_of
from procpipe.plan.schedules.zero_bubble import zb_v
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from tests.plan.proof import prove
from tests.plan.schedules.grids import grid, read


def test_looped_and_folded_placements() -> None:
    assert looped(6, 3) == (0, 1, 2, 0, 1, 2)
    assert folded(6, 3) == (0, 1, 2, 2, 1, 0)
    assert folded(8, 2) == (0, 1, 1, 0, 0, 1, 1, 0)
    assert looped(3, 3) == folded(3, 3) == (0, 1, 2)
    assert partitions_of(folded(6, 3), 1) == (1, 4)


def test_faults_of_a_placement_are_reported() -> None:
    for placement in ((1, 0), (0, 0), (0, 1, 2)):
        plan = Plan(1, 2, gpipe(1, 3).cycles, placement)
        with pytest.raises(PlanError, match=r"placement \[.* must begin with stage 0, .* all 2 st"):
            verify(plan, Routes(2, placement=placement))
    with pytest.raises(PlanError, match=r"on the stages \[0, 1, 0\], and the model of \[0, 1, 2\]"):
        verify(gpipe(1, 2, placement=(0, 1, 0)), Routes(3))


def test_one_stage_may_have_the_whole_model() -> None:
    for schedule in (*SCHEDULES.values(), schedule_of(zb_v)):
        assert schedule.place(1, 1) == (0,)
        prove(schedule.plan(4, (0,), ()), Routes(1))
    with pytest.raises(BalanceError, match=r"1 partitions, .*'interleaved' runs 2 on 2 stages"):
        SCHEDULES["interleaved"].place(1, 2)


def test_a_placement_is_part_of_a_plans_text() -> None:
    plan = gpipe(2, 2, placement=(0, 1, 1, 0))
    assert plan.to_text().splitlines()[0] == "plan m=2 n=2 placement=0,1,1,0"
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_text(plan.to_text()).placement == (0, 1, 1, 0)
    assert Plan.from_text("plan m=1 n=3\n").placement == (0, 1, 2)
    with pytest.raises(ValueError, match="line 1: 'plan m=2 n=2 placement=0,x' is not a header"):
        Plan.from_text("plan m=2 n=2 placement=0,x\n")


def test_all_micro_batches_pass_one_partition_before_the_next() -> None:
    assert grid(forward_plan(2, 2, (0, 1, 1, 0))) == read("""
        F0@0  --
        F1@0  F0@1
        --    F1@1
        --    F0@2
        F0@3  F1@2
        F1@3  --
    """)
    assert grid(backward_plan(2, 2, {0}, (0, 1, 0, 1))) == read("""
        --    B1@3
        B1@2  R0@3
        R0@2  B0@3
        B0@2  B1@1
        B1@0  R0@1
        R0@0  B0@1
        B0@0  --
    """)
