"""Timelines: literal ones, the bubble's formula, and random ones computed in a second way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe
from procpipe.plan.task import Plan, Task
from procpipe.plan.verify import verify
from procpipe.planner.costs import Costs, Layer, Machine, task_seconds
from procpipe.planner.simulation import Timeline, simulate
from tests.cases import for_each
from tests.plan.schedules.grids import SIZES

SECONDS = st.floats(0, 9, allow_nan=False)


def times(timeline: Timeline, stage: int) -> dict[str, tuple[float, float]]:
    return {
        f"{task.kind}{task.i}": timeline.spans_s[task] for task in timeline.plan.tasks_of(stage)
    }


def test_a_timeline_drawn_by_hand() -> None:
    # stage 0   [F0][F1]          [──B1──][──B0──]
    # stage 1       [F0][F1][──B1──][──B0──]
    timeline = simulate(gpipe(2, 2), Costs.uniform(2, forward_s=1, backward_s=2))
    assert times(timeline, 0) == {"F0": (0, 1), "F1": (1, 2), "B1": (5, 7), "B0": (7, 9)}
    assert times(timeline, 1) == {"F0": (1, 2), "F1": (2, 3), "B1": (3, 5), "B0": (5, 7)}
    assert timeline.total_s == 9
    assert timeline.bubble == pytest.approx(1 / 3)


def test_a_send_occupies_its_stage_and_the_host_each_task() -> None:
    # A message of 4 bytes down and up; the skip of 2 bytes past stage 1.
    costs = replace(
        Costs.uniform(3, backward_s=1, output_bytes=4),
        machine=Machine(host_s=0.5, send_s=0.25, hop_s=10, step_s=7),
        skip_bytes={(0, 2): 2},
    )
    timeline = simulate(gpipe(2, 3), costs)

    assert times(timeline, 0)["F0"] == (0.5, 1.5)
    assert times(timeline, 0)["F1"] == (3.5, 4.5)  # after 1.5 s of sending, and 0.5 s
    assert times(timeline, 1)["F0"] == (13.5, 14.5)  # sent at 3, there at 13
    assert times(timeline, 2)["F0"] == (26, 27)
    assert times(timeline, 2)["F1"] == (29, 30)
    assert times(timeline, 2)["B1"] == (30.5, 31.5)  # the last stage sends no output
    assert timeline.total_s == times(timeline, 0)["B0"][1] + 7


def test_two_partitions_of_one_stage_send_each_other_nothing() -> None:
    costs = Costs.uniform(2, backward_s=1, output_bytes=8)
    costs = replace(costs, machine=Machine(send_s=1.0, hop_s=5.0))
    plan = gpipe(1, 1, placement=(0, 0))

    assert simulate(plan, costs).total_s == 4


UNORDERED = Plan.from_text("plan m=1 n=2\nF0@1\nF0@0")


@for_each(
    ("call", "message"),
    [
        (lambda: simulate(UNORDERED, Costs.uniform(2)), "uses what no task before it makes"),
        (lambda: simulate(gpipe(1, 2), Costs.uniform(3)), "plan has 2 stages, but the costs 3"),
        (
            lambda: simulate(gpipe(1, 2), Costs.uniform(2), Routes(3)),
            "the plan has 2 stages, but the routes 3",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_all_reduces_drawn_by_hand() -> None:
    # stage 0   [F0][F1]          [──B1──][──B0──]A0      B0 from 7 to 9
    # stage 1       [F0][F1][──B1──][──B0──]A0            B0 from 5 to 7
    mib = 2**20
    small, large = (Layer("", task_seconds(1, 2), trained_bytes=n * mib) for n in (25, 50))
    # 2.5 s for 25 MiB: half is sent, and half of the sum.
    costs = Costs((small, large), Machine(send_s=0.1 / mib), num_replicas=2)

    # Stage 0 has one bucket, after B0 until 11.5. The second bucket of stage 1 is after its B0, the
    # first beside it, until 10.
    timeline = simulate(gpipe(2, 2), costs)
    nothing = replace(small, trained_bytes=0)
    later = simulate(gpipe(2, 2), replace(costs, partitions=(nothing, large)))

    assert (timeline.total_s, timeline.exposed_s) == (11.5, 2.5)
    assert (later.total_s, later.exposed_s) == (10, 1)
    assert simulate(forward_plan(2, 2), costs).exposed_s == 0
    assert simulate(gpipe(2, 2), replace(costs, num_replicas=1)).exposed_s == 0


@for_each(("m", "n"), SIZES)
def test_the_bubble_of_fill_and_drain_is_the_papers(m: int, n: int) -> None:
    costs = Costs.uniform(n, forward_s=0.7, backward_s=1.9, recompute_s=0.3)
    for plan in (forward_plan(m, n), backward_plan(m, n), gpipe(m, n)):
        assert simulate(plan, costs).bubble == pytest.approx((n - 1) / (m + n - 1), abs=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Costs, Routes]:
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    again = draw(st.sets(st.integers(0, m - 1)))
    plan = draw(
        st.sampled_from([gpipe(m, n, recompute=again), forward_plan(m, n), backward_plan(m, n)])
    )
    seconds = draw(st.tuples(*[st.builds(task_seconds, SECONDS, SECONDS, SECONDS)] * n))
    costs = Costs(tuple(Layer("", each) for each in seconds), Machine(hop_s=draw(SECONDS)))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True).map(tuple)) if pairs else ()
    return plan, costs, Routes(n, skips)


@given(case=cases())
def test_a_second_computation_agrees_also_with_skips(
    case: tuple[Plan, Costs, Routes],
) -> None:
    plan, costs, routes = case
    ends: dict[Task, float] = {}
    free = [0.0] * plan.num_stages
    timeline = simulate(plan, costs, routes)
    for task in plan.tasks():
        start = free[task.j]
        for transfer in routes.needed(task):
            start = max(start, ends[transfer.makers[0]] + costs.machine.hop_s)
        ends[task] = free[task.j] = start + costs.seconds[task.kind][task.j]
        assert timeline.spans_s[task] == (start, ends[task])
    assert timeline.total_s == max(free)


@pytest.mark.slow
@pytest.mark.timeout(60)  # it takes 0.25 s; what looks at all pairs of tasks, for ever
def test_a_thousand_stages_are_verified_and_simulated() -> None:
    m, n = 16, 1024
    verify(gpipe(m, n), Routes(n))
    timeline = simulate(gpipe(m, n), Costs.uniform(n, output_bytes=1))
    assert timeline.total_s == 3 * (m + n - 1)
    assert timeline.bubble == pytest.approx((n - 1) / (m + n - 1), abs=1e-12)
    assert timeline.peak_bytes(n - 1) == 2 * m
