"""The search: small plans as grids, bounds reached, limits kept, never worse than fixed plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procpipe.plan.costs import Costs
from procpipe.plan.memory import peak_bytes
from procpipe.plan.placement import folded, looped
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.zero_bubble import zb_h1
from procpipe.plan.simulate import simulate
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.tuning.list_schedule import ListRule, list_schedule, windows
from procpipe.tuning.one_at_a_time import one_at_a_time
from procpipe.tuning.search import (
    SEARCHED,
    Candidate,
    _shortest_s,
    candidates,
    least_bytes,
    searched,
)
from tests.cases import for_each
from tests.plan.schedules.grids import SOME_SIZES, grid, read


def made(m: int, costs: Costs, routes: Routes, **options: object) -> Plan:
    plan = list_schedule(m, costs, routes, **options)  # type: ignore[arg-type]
    assert plan is not None
    verify(plan, routes)
    return plan


def without_search(found: list[Candidate]) -> list[Candidate]:
    return [candidate for candidate in found if candidate.name != SEARCHED]


# -- small plans ---------------------------------------------------------------------------------


def test_a_stage_that_takes_twice_as_long_is_never_idle() -> None:
    costs = Costs((1.0, 2.0), (2.0, 4.0), (0.0, 0.0), input_gradient_s=(1.0, 2.0))
    plan = made(3, costs, Routes(2), rule=ListRule(in_two=True, window=None))
    assert grid(plan) == read("""
        F0  --
        F1  F0
        F2  I0
        I0  F1
        W0  I1
        I1  F2
        W1  I2
        I2  W0
        W2  W1
        --  W2
    """)
    assert simulate(plan, costs).total_s == 1 + 3 * (2 + 2 + 2)


def test_one_micro_batch_at_a_time() -> None:
    plan = one_at_a_time(2, Routes(2), recompute={0})
    verify(plan, Routes(2))
    assert grid(plan) == read("""
        F0  --
        --  F0
        --  R0
        R0  B0
        B0  --
        F1  --
        --  F1
        --  B1
        B1  --
    """)


def test_a_window_covers_the_round_trip_of_the_first_micro_batch() -> None:
    uniform = Costs.uniform(4)
    assert windows(9, uniform, looped(4, 4), ListRule()) == [4, 3, 2, 1]  # as in 1F1B
    assert windows(9, uniform, looped(4, 4), ListRule(window=-2)) == [2, 1, 1, 1]
    assert windows(3, uniform, looped(4, 4), ListRule(window=1)) == [3, 3, 3, 2]
    assert windows(9, uniform, looped(4, 4), ListRule(window=None)) == [9, 9, 9, 9]
    far = Costs.uniform(2, transfer_s=1.5)  # F 1, hop 1.5, F and B 3, hop 1.5: 7 of a period of 3
    assert windows(9, far, looped(2, 2), ListRule()) == [3, 1]


def test_memory_is_used_up_to_the_limit() -> None:
    """Room for three micro-batches of 10 bytes, each received one task early: 1F1B needs five."""
    costs, routes = Costs.uniform(4, saved_bytes=10, output_bytes=1, input_bytes=1), Routes(4)
    limits = [13 * 3] * 4
    (only,) = candidates(8, costs, routes, limits_bytes=limits)
    assert only.name == SEARCHED
    assert all(26 < peak <= 39 for peak in only.peak_bytes[:2])


# -- bounds --------------------------------------------------------------------------------------


@for_each(("m", "n"), SOME_SIZES)
def test_equal_tasks_reach_the_published_bounds(m: int, n: int) -> None:
    routes, costs = Routes(n), Costs.uniform(n, forward_s=1.0, backward_s=2.0)
    whole = made(m, costs, routes, rule=ListRule())
    assert simulate(whole, costs).total_s == 3 * (m + n - 1)  # GPipe, 1F1B: (m+n-1)(F+B)
    found = searched(m, costs, routes)
    assert found is not None
    total_s = simulate(found, costs).total_s
    if m >= 2 * n - 1:  # zero bubble: no stage is idle after its first micro-batch
        assert total_s == 3 * m + n - 1
    if m >= n:  # ZB-H1: m(F+I+W) + (n-1)(F+I-W), except what two stages cannot put off
        assert total_s <= max(3 * m + n - 1, simulate(zb_h1(m, n), costs).total_s)


@for_each(("m", "n"), SOME_SIZES)
def test_no_plan_is_worse_than_the_best_fixed_one(m: int, n: int) -> None:
    placement = (looped, folded)[m % 2](2 * n, n) if m * n <= 16 else looped(n, n)
    p = len(placement)
    skips = ((0, p - 1),) if p > 1 else ()
    routes = Routes(n, skips, target=True, placement=placement)
    costs = Costs.uniform(p, transfer_s=0.25, output_bytes=1, saved_bytes=4, put_off_bytes=2)
    found = candidates(m, costs, routes, recompute=recomputed("except_last", m))
    assert SEARCHED in {candidate.name for candidate in found}
    for candidate in found:
        verify(candidate.plan, routes)
        assert found[0].total_s <= candidate.total_s


UNEQUAL = {
    "unequal stages": Costs((1.0, 1.3, 0.8, 1.2), (2.0, 2.5, 1.7, 2.1), (1.0,) * 4),
    "a short W": Costs((1.0,) * 4, (3.0,) * 4, (1.0,) * 4, input_gradient_s=(2.5,) * 4),
    "a long I": Costs((1.0,) * 4, (4.0,) * 4, (1.0,) * 4, input_gradient_s=(3.0,) * 4),
    "transfers that cost": Costs.uniform(4, transfer_s=1.0),
}


@for_each("costs", UNEQUAL.values(), ids=UNEQUAL)
def test_costs_with_which_the_search_is_faster_than_fixed_plans(costs: Costs) -> None:
    found = candidates(8, costs, Routes(4))
    assert found[0].name == SEARCHED
    assert found[0].total_s < 0.97 * without_search(found)[0].total_s


def test_more_memory_is_never_slower() -> None:
    """From the least possible to GPipe's, past where the first fixed schedule fits."""
    costs, routes = Costs.uniform(4, saved_bytes=10, put_off_bytes=5, output_bytes=1), Routes(4)
    least = max(least_bytes(8, costs, routes))
    totals_s, num_fixed = [], []
    for limit in range(least, 60, 5):
        found = candidates(8, costs, routes, limits_bytes=[limit] * 4)
        totals_s.append(found[0].total_s)
        num_fixed.append(len(without_search(found)))
    assert totals_s[0] > 2 * totals_s[-1]
    assert totals_s[-1] == 3 * 8 + 3
    assert totals_s == sorted(totals_s, reverse=True)
    assert num_fixed[0] == 0 < num_fixed[-1]


# -- random costs --------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Costs, Routes, set[int]]:
    m, n, v = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    p = n * v
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.7, 5.0])
    sizes = st.integers(0, 100)

    def each(of: st.SearchStrategy[object]) -> tuple[object, ...]:
        return draw(st.tuples(*[of] * p))

    pairs = [(a, b) for a in range(p) for b in range(a + 1, p)]
    skips = (
        draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3).map(tuple)) if pairs else ()
    )
    ties = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2)) if pairs else []
    place = draw(st.sampled_from([looped, folded]))
    saved = each(sizes)
    costs = Costs(
        each(seconds),  # type: ignore[arg-type]
        each(seconds),  # type: ignore[arg-type]
        each(seconds),  # type: ignore[arg-type]
        transfer_s=draw(seconds),
        input_bytes=draw(sizes),
        output_bytes=each(sizes),  # type: ignore[arg-type]
        skip_bytes={skip: draw(sizes) for skip in skips},
        target_bytes=draw(sizes),
        saved_bytes=saved,  # type: ignore[arg-type]
        put_off_bytes=tuple(size // 2 for size in saved),  # type: ignore[operator]
        tied_bytes={tie: draw(sizes) for tie in ties},
        tied_s={tie: draw(seconds) for tie in ties},
    )
    routes = Routes(n, skips, draw(st.booleans()), placement=place(p, n), ties=tuple(ties))
    return m, costs, routes, draw(st.sets(st.integers(0, m - 1)))


RULES = st.builds(
    ListRule,
    in_two=st.booleans(),
    window=st.sampled_from([None, -9, -1, 0, 2]),
    patience=st.sampled_from([0.0, 0.7]),
    deep_first=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(case=cases(), rule=RULES, share=st.floats(0.0, 1.0))
def test_limits_are_kept_by_every_rule(
    case: tuple[int, Costs, Routes, set[int]], rule: ListRule, share: float
) -> None:
    m, costs, routes, again = case

    def peaks(plan: Plan) -> list[int]:
        return [peak_bytes(plan, costs, routes, stage) for stage in range(routes.num_stages)]

    most = peaks(made(m, costs, routes, rule=rule, recompute=again))
    frugal = one_at_a_time(m, routes, recompute=again, in_two=rule.in_two)
    verify(frugal, routes)
    least = peaks(frugal)
    limits = [low + int(share * max(0, high - low)) for low, high in zip(least, most, strict=True)]
    plan = list_schedule(m, costs, routes, rule=rule, recompute=again, limits_bytes=limits)
    if plan is not None:
        verify(plan, routes)
        assert all(peak <= limit for peak, limit in zip(peaks(plan), limits, strict=True))
        assert {task.i for task in plan.tasks() if task.kind == "R"} == again


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_no_plan_is_faster_than_the_bound_at_which_the_search_ends(
    case: tuple[int, Costs, Routes, set[int]],
) -> None:
    m, costs, routes, again = case
    shortest_s = _shortest_s(m, costs, routes, again)
    for found in candidates(m, costs, routes, recompute=again):
        assert found.total_s >= shortest_s - 1e-9, found.name


def test_the_bound_has_the_transfer_of_a_tied_gradient() -> None:
    costs = Costs.uniform(2)
    tied = replace(costs, tied_bytes={(0, 1): 8}, tied_s={(0, 1): 3.0})
    routes = Routes(2, ties=((0, 1),))
    assert _shortest_s(4, tied, routes, ()) == _shortest_s(4, costs, Routes(2), ()) + 3
    found, apart = candidates(4, tied, routes), candidates(4, costs, Routes(2))
    assert found[0].total_s == apart[0].total_s + 3


def test_nothing_fits_if_one_micro_batch_does_not_fit() -> None:
    costs, routes = Costs.uniform(2, saved_bytes=10, output_bytes=1), Routes(2)
    least = least_bytes(4, costs, routes)
    assert least == (12, 12)  # root, saved and gradient; at the last, input, root and saved
    assert candidates(4, costs, routes, limits_bytes=least)
    assert candidates(4, costs, routes, limits_bytes=[12, 11]) == []


def test_gradients_of_tied_parameters_have_room_from_the_start() -> None:
    """They may arrive at any time. With room for them, two micro-batches need 49 bytes, one 37."""
    costs = Costs.uniform(2, saved_bytes=10, output_bytes=1)
    costs = replace(costs, tied_bytes={(0, 1): 25}, tied_s={(0, 1): 1.0})
    routes = Routes(2, ties=((0, 1),))
    for limit, peak in ((40, 37), (46, 37), (49, 49)):
        plan = made(4, costs, routes, limits_bytes=[limit] * 2)
        assert peak_bytes(plan, costs, routes, 0) == peak


def test_recomputing_an_unknown_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot recompute micro-batches \[4\]: there are 2"):
        list_schedule(2, Costs.uniform(2), Routes(2), recompute={4})


def test_all_that_a_task_sends_to_a_stage_must_fit_there() -> None:
    """I1@1 sends stage 0 a gradient and a skip's, a byte each, while it still holds W0's byte."""
    costs = Costs(
        (0.0,) * 2,
        (0.0,) * 2,
        (0.0,) * 2,
        transfer_s=0.5,
        output_bytes=(1, 0),
        skip_bytes={(0, 1): 1},
        saved_bytes=(2, 0),
        put_off_bytes=(1, 0),
    )
    routes, rule = Routes(2, ((0, 1),)), ListRule(in_two=True, window=None)
    plan = made(2, costs, routes, rule=rule, limits_bytes=[7, 9])
    assert peak_bytes(plan, costs, routes, 0) == 7
    less = list_schedule(2, costs, routes, rule=rule, limits_bytes=[6, 9])
    assert less is None or peak_bytes(less, costs, routes, 0) <= 6
