"""All-reduces over replicas in a simulated step: literal times, and every schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import forward_plan, gpipe
from procpipe.plan.task import Plan
from procpipe.planner.all_reduce import AllReduce, Bucket, in_a_row
from procpipe.planner.costs import Costs
from procpipe.planner.memory import held_bytes
from procpipe.planner.simulation import simulate


def spans(plan: Plan, costs: Costs, routes: Routes | None = None) -> list[tuple[int, float, float]]:
    return [(a.stage, a.start_s, a.end_s) for a in simulate(plan, costs, routes).all_reduces]


def test_a_step_drawn_by_hand() -> None:
    # stage 0   [F0][F1]          [──B1──][──B0──]        B0 from 7 to 9
    # stage 1       [F0][F1][──B1──][──B0──]              B0 from 5 to 7
    half, whole = Bucket(10, 3.0, ((0, 0.5),)), Bucket(20, 1.0, ((0, 1.0),))
    other = Bucket(30, 2.5, ((1, 1.0),))
    costs = replace(Costs.uniform(2), buckets=((half, whole), (other,)))

    timeline = simulate(gpipe(2, 2), costs)

    assert timeline.all_reduces == (
        AllReduce(0, 10, 8.0, 11.0),  # half of B0 is done
        AllReduce(0, 20, 11.0, 12.0),  # final at 9, after the one before it
        AllReduce(1, 30, 7.0, 9.5),
    )
    assert (timeline.total_s, timeline.exposed_s) == (12, 3)
    assert timeline.exposed == 3 / 12
    assert timeline.hidden == pytest.approx(1 - (2 + 1 + 0.5) / 6.5)
    assert timeline.bubble == 1 - 12 / 24  # 6 s of work on each stage
    short = replace(costs, buckets=((), (Bucket(1, 2.0, ((1, 1.0),)),)))
    assert simulate(gpipe(2, 2), short).exposed_s == 0  # ends with stage 0's B0
    assert simulate(gpipe(2, 2), short).hidden == 1
    assert simulate(gpipe(2, 2), Costs.uniform(2)).all_reduces == ()


def test_a_bucket_of_two_partitions_waits_for_both() -> None:
    # One stage with two partitions: [F0@0][F0@1][──B0@1──][──B0@0──]
    plan = Plan.from_text("plan m=1 n=1 placement=0,0\nF0@0\nF0@1\nB0@1\nB0@0")
    both = Bucket(10, 1.0, ((1, 1.0), (0, 0.25)))
    costs = replace(Costs.uniform(2), buckets=((both,),))

    assert spans(plan, costs) == [(0, 4.5, 5.5)]


def test_gradients_of_tied_parameters_come_last() -> None:
    # What stage 1 sends after its last task, at 7, is with stage 0 at 17; the other way 9 and 19.
    own, tied = Bucket(10, 1.0, ((0, 1.0),)), Bucket(20, 2.0, ())
    costs = replace(
        Costs.uniform(2),
        tied_bytes={(0, 1): 20},
        tied_s={(0, 1): 10.0},
        buckets=((own, tied), (tied,)),
    )
    assert spans(gpipe(2, 2), costs) == [(0, 9, 10), (0, 17, 19), (1, 19, 21)]
    assert simulate(gpipe(2, 2), costs).exposed_s == 2


def test_the_seconds_of_several_ties_are_added_up_exactly() -> None:
    ties: dict[tuple[int, ...], float] = {(0, 1): 0.1, (0, 2): 0.2, (1, 3): 0.3}
    costs = replace(Costs.uniform(4), tied_bytes=dict.fromkeys(ties, 8), tied_s=ties)
    plan = gpipe(1, 2, placement=(0, 1, 1, 0))
    assert costs.tied_into(0, plan) == {1: (24, 0.6)}
    assert costs.tied_into(1, plan) == {0: (24, 0.6)}


def test_a_call_without_backward_adds_up_nothing() -> None:
    costs = replace(Costs.uniform(2), buckets=((Bucket(1, 9.0, ((0, 1.0),)),), ()))

    assert simulate(forward_plan(2, 2), costs).all_reduces == ()


def test_buckets_must_fit_the_plan() -> None:
    strange = Bucket(1, 1.0, ((1, 1.0),))
    for buckets, words in (
        (((strange,),), "2 stages, but the costs' buckets are of 1"),
        (((strange,), ()), "stage 0 with gradients of partition 1, which is on another stage"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(gpipe(1, 2), replace(Costs.uniform(2), buckets=buckets))


def test_copies_are_held_from_the_task_that_begins_their_all_reduce() -> None:
    # Stage 0 of 2 holds the inputs of 2 micro-batches of 100 bytes, and copies of 30 and 5.
    first, second = Bucket(30, 1.0, ((0, 0.5),)), Bucket(5, 1.0, ())
    costs = replace(Costs.uniform(2, input_bytes=100), buckets=((first, second), ()))
    routes = Routes(2)

    held = list(held_bytes(gpipe(2, 2), costs, routes, 0))

    without = list(held_bytes(gpipe(2, 2), replace(costs, buckets=()), routes, 0))
    assert max(held) == max(without) == 200  # both micro-batches, before there is any copy
    assert held[-1] == without[-1] == 0
    assert 135 in held, "B0 holds one micro-batch and the copies"
    assert 135 not in without


def test_buckets_that_become_final_together_run_as_one() -> None:
    draw = random.Random(1)
    finals = [((0, 0.5),), ((0, 1.0),), ((1, 1.0), (0, 0.25)), ((1, 0.5),), ()]
    routes = Routes(1, placement=(0, 0))
    plan = Plan.from_text("plan m=1 n=1 placement=0,0\nF0@0\nF0@1\nB0@1\nB0@0")
    for _ in range(50):
        buckets = [
            Bucket(draw.randrange(1, 99), draw.random(), draw.choice(finals)) for _ in range(9)
        ]
        merged = in_a_row(buckets)
        assert all(one.final != after.final for one, after in pairwise(merged))
        one_by_one, at_once = (
            replace(Costs.uniform(2), buckets=(tuple(those),)) for those in (buckets, merged)
        )
        slow, quick = (simulate(plan, costs, routes) for costs in (one_by_one, at_once))
        assert quick.total_s == pytest.approx(slow.total_s)
        assert quick.hidden == pytest.approx(slow.hidden)
        assert list(held_bytes(plan, at_once, routes, 0)) == list(
            held_bytes(plan, one_by_one, routes, 0)
        )
