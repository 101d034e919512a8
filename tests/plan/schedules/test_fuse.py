"""Halves of backward tasks are fused where no other task then starts later."""

from __future__ import annotations

import pytest

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.fuse import fused
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.schedules.zero_bubble import zb_h1, zb_v
from procpipe.plan.task import Plan
from procpipe.planner.costs import Costs
from procpipe.planner.memory import all_peak_bytes
from procpipe.planner.simulation import simulate
from tests.cases import for_each
from tests.plan.schedules.grids import SIZES, grid, read


def equal(plan: Plan) -> Costs:
    return Costs.uniform(plan.num_partitions, forward_s=1.0, backward_s=2.0)


def test_a_half_that_the_stage_before_waits_for_is_not_fused() -> None:
    plan = zb_h1(3, 2)
    assert grid(plan) == read("""
        F0  --
        F1  F0
        --  I0
        I0  F1
        W0  I1
        F2  W0
        I1  F2
        W1  I2
        I2  W1
        W2  W2
    """)
    assert grid(fused(plan)) == read("""
        F0  --
        F1  F0
        --  I0
        B0  F1
        F2  I1
        B1  W0
        --  F2
        --  I2
        B2  W1
        --  W2
    """)


@for_each(("m", "n"), SIZES)
def test_nothing_ends_later_and_no_stage_holds_more(m: int, n: int) -> None:
    for make in (zb_h1, zb_v):
        mode = ("never", "except_last")[(m + n) % 2]
        plan = make(m, n, recompute=recomputed(mode, m))
        p, routes = plan.num_partitions, Routes(n, placement=plan.placement)
        costs = Costs.uniform(p, kept_bytes=3, put_off_bytes=2)
        made = fused(plan)
        before, after = simulate(plan, costs), simulate(made, costs)
        assert after.total_s <= before.total_s + 1e-9
        peaks = (all_peak_bytes(one, costs, routes) for one in (made, plan))
        assert all(now <= then for now, then in zip(*peaks, strict=True))
        busy_s = [(1 - one.bubble) * one.total_s for one in (before, after)]
        assert busy_s[0] == pytest.approx(busy_s[1])


def test_the_schedules_split_backward_only_where_it_helps() -> None:
    for name, make in (("zb-h1", zb_h1), ("zb-v", zb_v)):
        plan = make(8, 2)
        joined = SCHEDULES[name].plan(8, plan.placement, ())
        kinds = [task.kind for task in joined.tasks()]
        assert kinds.count("B") + kinds.count("I") == 8 * plan.num_partitions
        assert 0 < kinds.count("I") == kinds.count("W") <= 8
        assert simulate(joined, equal(plan)).total_s == simulate(plan, equal(plan)).total_s
