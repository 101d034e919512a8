"""The decisions of rank 0 with ``schedule="auto"``, without processes or clocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import pytest

from procpipe.errors import MemoryLimitError
from procpipe.model.arguments import checked_limits
from procpipe.plan.costs import Costs
from procpipe.plan.placement import folded
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.named import AUTO, SCHEDULES
from procpipe.plan.simulate import simulate
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run.chooser import Choice
from procpipe.tuning.auto import (
    BYTES,
    NOTHING,
    SECONDS,
    WHOLE,
    AutoSchedule,
)
from procpipe.tuning.step_costs import Report, costs_of
from tests.cases import for_each

ROUTES = Routes(2, target=True)

#: Unequal stages, transfers that cost, and sizes.
TRUE = Costs(
    (1.0, 1.5),
    (2.5, 3.5),
    (1.0, 1.5),
    transfer_s=(1.0,),
    input_bytes=8,
    output_bytes=(16, 4),
    target_bytes=2,
    input_gradient_s=(1.0, 1.5),
    weight_gradient_s=(1.5, 2.0),
    saved_bytes=(64, 32),
    put_off_bytes=(24, 12),
)


def reports_of(choice: Choice, costs: Costs, routes: Routes, slower: float = 1.0) -> list[Report]:
    """Simulate a plan on stages of these costs with different clocks; return the ranks' reports."""
    timeline = simulate(choice.plan, costs, routes)
    reports = []
    for stage in range(routes.num_stages):
        clock_s = 100.0 * stage
        tasks = [
            (*task, clock_s + timeline.start_s(task), clock_s + timeline.end_s(task))
            for task in choice.plan.tasks_of(stage)
        ]
        report = Report(slower * timeline.total_s - 0.125 * stage, tasks)
        if choice.measure == BYTES:
            report = Report()
            for j, its_stage in enumerate(routes.placement):
                if its_stage != stage:
                    continue
                stashed = sum(
                    costs.skip_bytes.get(skip, 0) for skip in routes.skips if skip[0] == j
                )
                report.sizes += [("output", j, j, costs.output_bytes[j] + stashed)]
                if j:
                    report.sizes += [("activation", j - 1, j, costs.output_bytes[j - 1])]
                else:
                    report.sizes += [("activation", -1, 0, costs.input_bytes)]
                skips = [skip for skip in routes.skips if skip[1] == j]
                report.sizes += [("skip", *skip, costs.skip_bytes[skip]) for skip in skips]
                report.sizes += [("saved", j, j, costs.saved_bytes[j] - less) for less in (0, 1)]
                report.sizes += [("put off", j, j, costs.put_off_bytes[j])]
            if stage == routes.placement[-1]:
                report.sizes += [("target", 0, len(routes.placement) - 1, costs.target_bytes)]
        reports.append(Report(**json.loads(json.dumps(asdict(report)))))
    return reports


def run(
    auto: AutoSchedule,
    num_steps: int,
    costs: Costs = TRUE,
    routes: Routes = ROUTES,
    m: int = 4,
    slower: Callable[[str], float] = lambda name: 1.0,
    recompute: Sequence[int] = (),
) -> list[Choice]:
    choices = []
    for _ in range(num_steps):
        choice = auto.choose(m, 2, recompute, routes)
        choices.append(choice)
        if choice.measure != NOTHING:
            auto.add_reports(reports_of(choice, costs, routes, slower(choice.schedule)))
    return choices


def test_auto_measures_tries_and_chooses() -> None:
    choices = run(AutoSchedule(), 17)
    first = [f"measuring, step {1 + k} of 6, {('1f1b', 'zb-h1')[k % 2]}" for k in range(6)]
    assert [choice.schedule for choice in choices[:6]] == first
    assert [choice.measure for choice in choices[:6]] == [BYTES] * 2 + [SECONDS] * 4
    assert [choice.schedule for choice in choices[6:15]] == [
        "trying 1f1b",
        "trying searched",
        "trying zb-h1",
    ] * 3
    assert [choice.measure for choice in choices[6:15]] == [WHOLE] * 9
    assert [(choice.schedule, choice.measure) for choice in choices[15:]] == [
        ("searched", NOTHING)
    ] * 2
    assert choices[15].plan == choices[7].plan


def test_costs_are_measured_whatever_the_clocks_show() -> None:
    auto = AutoSchedule()
    run(auto, 6)
    assert auto.costs == TRUE


@pytest.mark.parametrize("routes", [Routes(2, ((0, 3), (1, 2)), placement=(0, 1, 0, 1))])
def test_costs_of_partitions_that_share_a_stage(routes: Routes) -> None:
    true = Costs.uniform(
        4,
        forward_s=1.0,
        backward_s=2.0,
        transfer_s=0.5,
        skip_bytes={(0, 3): 5, (1, 2): 7},
        output_bytes=3,
        input_bytes=2,
    )
    auto = AutoSchedule()
    choices = run(auto, 6, true, routes)
    assert auto.costs == Costs(**{**asdict(true), "transfer_s": (0.5,) * 3})
    assert "interleaved" in choices[0].schedule
    assert "searched" in choices[1].schedule, "no fixed schedule with backward in two is looped"


def test_of_several_replicas_the_slowest_counts_on_each_stage() -> None:
    # Replica 0 is slower on stage 0, replica 1 on stage 1; replica 2 has no samples.
    slow = [replace(TRUE, forward_s=forward_s) for forward_s in ((4.0, 1.5), (1.0, 6.0))]
    auto = AutoSchedule()
    for _ in range(6):
        choice = auto.choose(4, 2, (), ROUTES)
        of_replicas = [reports_of(choice, costs, ROUTES) for costs in slow]
        auto.add_reports([*of_replicas[0], *of_replicas[1], Report(), Report()])

    assert auto.costs == replace(TRUE, forward_s=(4.0, 6.0), recompute_s=(4.0, 6.0))


def test_replicas_with_fewer_micro_batches_get_the_plan_of_the_same_name() -> None:
    auto = AutoSchedule()
    names = set()
    for _ in range(20):
        choice = auto.choose(4, 2, (), ROUTES)
        asked = auto.like(choice, 3, {0}, ROUTES), auto.like(choice, 4, (), ROUTES)
        for plan, m in zip(asked, (3, 4), strict=True):
            verify(plan, ROUTES)
            assert (plan.num_micro_batches, plan.has_backward) == (m, True)
        assert asked[1] == choice.plan
        if choice.name and choice.name != "searched":
            names.add(choice.name)
            assert asked[0] == SCHEDULES[choice.name].plan(3, ROUTES.placement, {0})
        if choice.measure:
            auto.add_reports(reports_of(choice, TRUE, ROUTES))
    assert names, "no fixed schedule was tried"


def test_two_partitions_a_stage_are_folded() -> None:
    routes = Routes(2, placement=folded(4, 2))
    choices = run(AutoSchedule(), 6, Costs.uniform(4), routes)
    assert choices[0].schedule.endswith("6, searched"), "no fixed one has a whole backward"
    assert choices[1].schedule.endswith("6, zb-v")


def test_the_plan_measured_as_fastest_is_chosen() -> None:
    """The plan simulated as fastest is measured as slow."""

    def slower(name: str) -> float:
        return 2.0 if name == "trying searched" else 1.0

    assert run(AutoSchedule(), 16, slower=slower)[15].schedule == "zb-h1"


def test_the_first_plan_stays_if_nothing_is_faster_by_the_margin() -> None:
    nothing_to_put_off = Costs((1.0,) * 2, (2.0,) * 2, (1.0,) * 2, input_gradient_s=(2.0,) * 2)
    choices = run(AutoSchedule(), 8, nothing_to_put_off)
    assert [(choice.schedule, choice.measure) for choice in choices[6:]] == [("1f1b", NOTHING)] * 2


def test_another_number_of_micro_batches_is_searched_for_and_not_measured() -> None:
    auto = AutoSchedule()
    run(auto, 7)
    (other_choice,) = run(auto, 1, m=3)  # while plans are tried
    assert (other_choice.plan.num_micro_batches, other_choice.measure) == (3, NOTHING)
    assert [choice.schedule for choice in run(auto, 9)] == [
        *["trying searched", "trying zb-h1", "trying 1f1b"] * 2,
        *["trying searched", "trying zb-h1"],
        "searched",
    ]
    assert run(auto, 1, m=3)[0].plan == other_choice.plan


def test_one_stage_has_nothing_to_measure() -> None:
    (only,) = run(AutoSchedule(), 1, Costs.uniform(1), Routes(1))
    assert (only.schedule, only.measure) == ("1f1b", NOTHING)


def again(plan: Plan) -> set[int]:
    return {task.i for task in plan.tasks() if task.kind == "R"}


def test_more_is_recomputed_where_that_is_faster_than_to_wait_for_room() -> None:
    """Stage 0 holds 8 + 16 + 64 bytes of a micro-batch, or 8 if it is recomputed."""
    cases = [(10_000, {0}), (200, {0}), (150, {0, 1, 2}), (120, {0, 1, 2, 3})]
    for limit, expected in cases:
        auto = AutoSchedule([limit, limit])
        choices = run(auto, 16, recompute=[0])
        assert [again(choice.plan) for choice in choices[:6]] == [{0, 1, 2, 3}] * 6
        assert all("one at a time" in choice.schedule for choice in choices[:6])
        assert again(choices[-1].plan) == expected
        is_printed = f", {len(expected)} of 4 micro-batches recomputed" in choices[-1].schedule
        assert is_printed == (expected != {0})
        for choice in choices:
            timeline = simulate(choice.plan, TRUE, ROUTES)
            assert all(timeline.peak_bytes(stage) <= limit for stage in range(2))


def test_if_nothing_fits_the_error_names_the_bytes() -> None:
    auto = AutoSchedule([1000, 50])
    run(auto, 5)
    with pytest.raises(
        MemoryLimitError, match=r"stage 1 needs 54 bytes .* its limit is 50"
    ) as error:
        run(auto, 1)
    assert error.value.lacks == ((1, 54, 50),)


def test_larger_micro_batches_are_expected_to_need_more() -> None:
    auto = AutoSchedule([120, 120])
    run(auto, 16)
    assert auto.choose(4, 2, (), ROUTES).measure == NOTHING
    with pytest.raises(MemoryLimitError, match="stage 0 needs 2"):
        auto.choose(4, 4, (), ROUTES)


@pytest.mark.parametrize(("tied_bytes", "expected_s"), [(400, 4.0), (50, 1.0)])
def test_seconds_of_tied_gradients_follow_from_the_largest_message(
    tied_bytes: int, expected_s: float
) -> None:
    of_bytes = [
        Report(sizes=[("output", 0, 0, 100), ("tied gradient", 1, 0, tied_bytes)]),
        Report(sizes=[("activation", 0, 1, 100), ("tied gradient", 0, 1, tied_bytes)]),
    ]
    of_seconds = [  # a hop of 1 s: half of 5 s above, less 3 s below
        Report(tasks=[("F", 0, 0, 0.0, 1.0), ("B", 0, 0, 6.0, 8.0)]),
        Report(tasks=[("F", 0, 1, 9.0, 10.0), ("B", 0, 1, 10.0, 12.0)]),
    ]
    costs = costs_of([of_bytes], [of_seconds], Routes(2, ties=((0, 1),)))
    assert (costs.tied_bytes, costs.tied_s) == ({(0, 1): tied_bytes}, {(0, 1): expected_s})


def test_costs_of_empty_reports_are_zero() -> None:
    costs = costs_of([], [], Routes(1))
    assert costs == Costs((0.0,), (0.0,), (0.0,), transfer_s=())


@for_each(
    ("limits", "is_auto", "error", "message"),
    [
        (5, False, ValueError, "only schedule='auto' can keep to a limit"),
        ("5", True, TypeError, "is '5', but must be an int"),
        (5.0, True, TypeError, "is 5.0, but must be an int"),
        (True, True, TypeError, "is True, but must be an int"),
        ([5, None], True, TypeError, "must be an int, or a sequence of one each"),
        (0, True, ValueError, "is 0, but a stage holds at least 1 byte"),
        ([5], True, ValueError, "has 1 limits, but there are 2 stages"),
    ],
)
def test_wrong_limits(limits: object, is_auto: bool, error: type[Exception], message: str) -> None:
    schedule = AUTO if is_auto else SCHEDULES["gpipe"]
    with pytest.raises(error, match=message):
        checked_limits(limits, 2, schedule, is_launched=True)  # type: ignore[arg-type]


def test_limits_are_one_each_or_one_for_all() -> None:
    assert checked_limits(None, 2, SCHEDULES["gpipe"], is_launched=True) is None
    assert checked_limits(7, 2, AUTO, is_launched=True) == [7, 7]
    assert checked_limits((7, 8), 2, AUTO, is_launched=True) == [7, 8]
    assert checked_limits((7, 8), 1, AUTO, is_launched=False) == [15]
