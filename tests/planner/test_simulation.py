"""Timelines: literal ones, the bubble's formula, and random ones computed in a second way."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe, recomputed
from procpipe.plan.task import Plan, Task
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import Timeline, simulate
from tests.cases import for_each
from tests.plan.schedules.grids import SIZES

SECONDS = st.floats(0, 9, allow_nan=False)


def times(timeline: Timeline, stage: int) -> dict[str, tuple[float, float]]:
    return {
        f"{task.kind}{task.i}": (timeline.start_s(task), timeline.end_s(task))
        for task in timeline.plan.tasks_of(stage)
    }


def test_a_timeline_drawn_by_hand() -> None:
    # stage 0   [F0][F1]          [──B1──][──B0──]
    # stage 1       [F0][F1][──B1──][──B0──]
    timeline = simulate(gpipe(2, 2), Costs.uniform(2, forward_s=1, backward_s=2))
    assert times(timeline, 0) == {"F0": (0, 1), "F1": (1, 2), "B1": (5, 7), "B0": (7, 9)}
    assert times(timeline, 1) == {"F0": (1, 2), "F1": (2, 3), "B1": (3, 5), "B0": (5, 7)}
    assert timeline.total_s == 9
    assert timeline.busy_s(0) == timeline.busy_s(1) == 6
    assert timeline.bubble == pytest.approx(1 / 3)


def test_a_recomputation_runs_while_the_gradient_is_under_way() -> None:
    costs = Costs.uniform(2, forward_s=1, backward_s=2, transfer_s=0.5)
    timeline = simulate(backward_plan(1, 2, {0}), costs)
    assert times(timeline, 1) == {"R0": (0, 1), "B0": (1, 3)}
    assert times(timeline, 0) == {"R0": (0, 1), "B0": (3.5, 5.5)}


def test_hops_take_their_own_time_there_and_back() -> None:
    costs = Costs((1, 1, 1), (1, 1, 1), (1, 1, 1), transfer_s=(10, 100))
    timeline = simulate(gpipe(1, 3), costs)
    assert timeline.start_s(Task("F", 0, 1)) == 11
    assert timeline.start_s(Task("F", 0, 2)) == 112
    assert timeline.start_s(Task("B", 0, 1)) == 214
    assert timeline.start_s(Task("B", 0, 0)) == 225


@for_each(("m", "n"), SIZES)
def test_the_bubble_of_fill_and_drain_is_the_papers(m: int, n: int) -> None:
    costs = Costs.uniform(n, forward_s=0.7, backward_s=1.9, recompute_s=0.3)
    for plan in (forward_plan(m, n), backward_plan(m, n), gpipe(m, n)):
        assert simulate(plan, costs).bubble == pytest.approx((n - 1) / (m + n - 1), abs=1e-12)


@for_each(("m", "n"), SIZES)
def test_recomputation_adds_no_idle_time(m: int, n: int) -> None:
    f, b, r = 0.7, 1.9, 0.3
    costs = Costs.uniform(n, forward_s=f, backward_s=b, recompute_s=r)
    idle = (n - 1) * (f + b)
    for mode in ("always", "except_last", "never"):
        again = recomputed(mode, m)
        total = idle + m * (f + b) + len(again) * r
        timeline = simulate(gpipe(m, n, recompute=again), costs)
        assert timeline.total_s == pytest.approx(total)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Costs, Routes]:
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    again = draw(st.sets(st.integers(0, m - 1)))
    plan = draw(
        st.sampled_from([gpipe(m, n, recompute=again), forward_plan(m, n), backward_plan(m, n)])
    )
    per_stage = st.tuples(*[SECONDS] * n)
    hops = draw(st.one_of(SECONDS, st.tuples(*[SECONDS] * (n - 1))))
    costs = Costs(draw(per_stage), draw(per_stage), draw(per_stage), hops)
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True).map(tuple)) if pairs else ()
    return plan, costs, Routes(n, skips)


@given(case=cases())
def test_a_second_computation_agrees_also_with_skips(
    case: tuple[Plan, Costs, Routes],
) -> None:
    plan, costs, routes = case
    seconds = {"F": costs.forward_s, "B": costs.backward_s, "R": costs.recompute_s}
    ends: dict[Task, float] = {}
    free = [0.0] * plan.num_stages
    timeline = simulate(plan, costs, routes)
    for task in plan.tasks():
        start = free[task.j]
        for transfer in routes.needed(task):
            low, high = sorted((transfer.source, transfer.destination))
            hop = max(costs.hops_s(plan.placement)[low:high])  # as long as its slowest boundary
            start = max(start, ends[transfer.makers[0]] + hop)
        ends[task] = free[task.j] = start + seconds[task.kind][task.j]
        assert timeline.start_s(task) == start
        assert timeline.end_s(task) == ends[task]
    assert timeline.total_s == max(free)


def test_a_task_that_is_not_in_the_plan_has_no_time() -> None:
    timeline = simulate(backward_plan(2, 2), Costs.uniform(2))
    for task in ("F0@0", "R0@0", "B2@0", "B0@2"):
        with pytest.raises(KeyError, match=f"{task} is not in the plan"):
            timeline.start_s(Task.parse(task))
        with pytest.raises(KeyError, match=f"{task} is not in the plan"):
            timeline.end_s(Task.parse(task))


def test_a_plan_that_uses_a_missing_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="uses what no task before it makes"):
        simulate(Plan.from_text("plan m=1 n=2\nF0@1\nF0@0"), Costs.uniform(2))


def test_costs_and_routes_must_fit_the_plan() -> None:
    with pytest.raises(ValueError, match="the plan has 2 stages, but the costs 3"):
        simulate(gpipe(1, 2), Costs.uniform(3))
    with pytest.raises(ValueError, match="the plan has 2 stages, but the routes 3"):
        simulate(gpipe(1, 2), Costs.uniform(2), Routes(3))
    with pytest.raises(ValueError, match="backward_s has 1 numbers, but forward_s has 2"):
        Costs((1, 1), (1,), (1, 1))
    with pytest.raises(ValueError, match=r"transfer_s has 2 numbers.* it must have 1"):
        Costs((1, 1), (1, 1), (1, 1), (1, 1))


def test_tasks_that_take_no_time_leave_no_bubble() -> None:
    assert simulate(gpipe(2, 2), Costs.uniform(2, forward_s=0, backward_s=0)).bubble == 0


@pytest.mark.slow
def test_a_thousand_stages_are_simulated_in_seconds() -> None:
    m, n = 64, 1024
    start_s = time.process_time()
    timeline = simulate(gpipe(m, n), Costs.uniform(n, output_bytes=1))
    assert timeline.total_s == 3 * (m + n - 1)
    assert timeline.bubble == pytest.approx((n - 1) / (m + n - 1), abs=1e-12)
    assert timeline.peak_bytes(n - 1) == 2 * m
    assert time.process_time() - start_s < 1  # 0.25 s on a quiet machine
