"""Zero bubble: the figures, the rest of the bubble, 1F1B's memory, and halves that are fused."""

from __future__ import annotations

import pytest

from procpipe.errors import PlanError
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.zero_bubble import fused, zb_h1, zb_v
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from tests.cases import for_each
from tests.plan.schedules.grids import SIZES, grid, read


def test_the_figure_of_zb_h1() -> None:
    assert grid(zb_h1(4, 3)) == read("""
        F0  --  --
        F1  F0  --
        F2  F1  F0
        --  --  I0
        --  I0  F1
        I0  F2  I1
        W0  I1  F2
        F3  W0  I2
        I1  F3  W0
        W1  I2  F3
        I2  W1  I3
        W2  I3  W1
        I3  W2  W2
        W3  W3  W3
    """)


def test_the_figure_of_zb_v() -> None:
    assert grid(zb_v(4, 2)) == read("""
        F0@0  --
        F1@0  F0@1
        F2@0  F0@2
        F0@3  F1@1
        I0@3  F1@2
        W0@3  I0@2
        F1@3  W0@2
        I1@3  F2@1
        W1@3  I0@1
        F3@0  W0@1
        I0@0  F2@2
        W0@0  I1@2
        F2@3  W1@2
        I2@3  F3@1
        W2@3  I1@1
        I1@0  W1@1
        W1@0  F3@2
        F3@3  I2@2
        I3@3  W2@2
        W3@3  I3@2
        --    I2@1
        I2@0  I3@1
        I3@0  W3@2
        W2@0  W2@1
        W3@0  W3@1
    """)


@for_each(("m", "n"), SIZES)
@for_each("halves_s", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 2.0, 1.0)])
def test_the_bubble_of_zb_h1(m: int, n: int, halves_s: tuple[float, float, float]) -> None:
    """(n-1)(F + I - W), where 1F1B's is (n-1)(F + I + W)."""
    f, i, w = halves_s
    costs = Costs.uniform(n, forward_s=f, backward_s=i + w, input_gradient_s=i)
    bubble_s = simulate(zb_h1(m, n), costs).total_s - m * (f + i + w)
    whole_s = simulate(one_f_one_b(m, n), costs).total_s - m * (f + i + w)
    assert whole_s == (n - 1) * (f + i + w)
    if m >= 2 * n:
        assert bubble_s == (n - 1) * (f + i - w)
    assert n == 1 or bubble_s < whole_s


@for_each(("m", "n"), SIZES)
def test_zb_v_is_idle_only_until_its_first_micro_batch(m: int, n: int) -> None:
    """Six tasks a micro-batch and stage; with few micro-batches, the path of the last counts."""
    total_s = simulate(zb_v(m, n), Costs.uniform(2 * n, forward_s=1.0, backward_s=2.0)).total_s
    least_s = max(6 * m + n - 1, 4 * n + 2 + 4 * (m - 1))
    if m >= 2 * n - 1 or m == 1:
        assert total_s == least_s
    assert least_s <= total_s <= least_s + n / 2


@for_each(("m", "n"), SIZES)
def test_both_hold_no_more_than_1f1b(m: int, n: int) -> None:
    """``n`` micro-batches a stage, or ``2n`` halves, even if W needs all that is saved."""
    whole = Costs.uniform(n, kept_bytes=2, put_off_bytes=2)
    halves = Costs.uniform(2 * n, kept_bytes=1, put_off_bytes=1)
    most = simulate(one_f_one_b(m, n), whole).peak_bytes(0)
    assert most == 2 * min(m, n)
    assert max(map(simulate(zb_h1(m, n), whole).peak_bytes, range(n))) <= most
    assert max(map(simulate(zb_v(m, n), halves).peak_bytes, range(n))) <= most


HALVES = "the plan must have B0@0, or I0@0 and W0@0, but has "


@for_each(
    ("text", "fault"),
    [
        ("F0@0\nI0@0", HALVES + "I0@0"),
        ("F0@0\nW0@0", HALVES + "W0@0"),
        ("F0@0\nB0@0\nW0@0", HALVES + "B0@0 and W0@0"),
        ("F0@0\nW0@0\nI0@0", "W0@0 in cycle 1 needs I0@0, which is in cycle 2"),
        ("F0@0\nB0@0\nI0@0\nW0@0", HALVES + "B0@0 and I0@0 and W0@0"),
        ("I0@0\nF0@0\nW0@0", "I0@0 in cycle 0 needs F0@0, which is in cycle 1"),
        ("F0@0\nI0@0\nR0@0\nW0@0", "I0@0 in cycle 1 needs R0@0, which is in cycle 2"),
    ],
)
def test_an_incomplete_backward_is_reported(text: str, fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        verify(Plan.from_text(f"plan m=1 n=1\n{text}\n"), Routes(1))
    assert caught.value.faults == (fault,)


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
        p = plan.num_partitions
        costs = Costs.uniform(p, kept_bytes=3, put_off_bytes=2)
        made = fused(plan)
        before, after = simulate(plan, costs), simulate(made, costs)
        assert after.total_s <= before.total_s + 1e-9
        peaks = ([*map(one.peak_bytes, range(n))] for one in (after, before))
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
