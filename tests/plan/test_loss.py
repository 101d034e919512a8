"""Where the loss goes: to every stage, ahead of a gradient, in the same order at both ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from procpipe.plan.placement import folded, looped
from procpipe.plan.program import Program, Receive, Run, Send, program
from procpipe.plan.routes import LOSS, Routes, Transfer
from procpipe.plan.schedules.gpipe import forward_plan, gpipe
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Plan
from tests.cases import case, for_each


def hops(*placement: int) -> list[tuple[int, int]]:
    routes = Routes(max(placement) + 1, placement=placement)
    return sorted(routes.stages_of(hop) for hop in routes.loss_hops)


def test_the_loss_passes_every_stage_as_gradients_do() -> None:
    assert hops(0) == []
    assert hops(0, 1, 2) == [(1, 0), (2, 1)]
    assert hops(*looped(6, 3)) == [(1, 0), (2, 1)]
    assert hops(*folded(6, 3)) == [(0, 1), (1, 2)]
    assert hops(0, 1, 0, 2) == [(0, 1), (2, 0)]
    assert hops(0, 1, 2, 1, 0, 1) == [(1, 0), (1, 2)]


def steps_of_middle(plan: Plan) -> list[str]:
    return [str(step) for step in program(plan, Routes(3), 1, has_loss=True)]


def test_a_stage_passes_the_loss_on_ahead_of_the_gradient_of_the_last_forward() -> None:
    assert steps_of_middle(gpipe(2, 3))[4:] == [
        "receive loss 0: 2->1",
        "receive gradient 1: 2->1",
        "run F1@1",
        "send activation 1: 1->2",
        "receive gradient 0: 2->1",
        "run B1@1",
        "send loss 0: 1->0",
        "send gradient 1: 1->0",
        "run B0@1",
        "send gradient 0: 1->0",
    ]


def test_without_gradients_the_loss_passes_at_the_end() -> None:
    assert steps_of_middle(forward_plan(1, 3)) == [
        "receive activation 0: 0->1",
        "run F0@1",
        "send activation 0: 1->2",
        "receive loss 0: 2->1",
        "send loss 0: 1->0",
    ]


def plans(n: int, m: int) -> Iterator[tuple[str, Plan]]:
    """Yield plans of every schedule, and of some placements that no schedule makes."""
    for name, schedule in SCHEDULES.items():
        placement = schedule.place(schedule.count(n), n)
        yield name, schedule.plan(m, placement, range(0, m, 2))
        yield f"forward of {name}", forward_plan(m, n, placement)
    turns = [(*range(n), *turn) for turn in permutations(range(n))] if n < 4 else []
    for turn in [*turns, folded(3 * n, n)]:
        yield f"gpipe on {turn}", gpipe(m, n, placement=turn)


def routes_of(plan: Plan) -> Iterator[Routes]:
    """Yield the routes of a plain model, and of one with skips and ties."""
    n, p = plan.num_stages, plan.num_partitions
    yield Routes(n, placement=plan.placement)
    pairs = [pair for pair in ((0, p - 1), (0, 2), (1, p - 1)) if pair[0] < pair[1] < p]
    ties = ((0, p - 1), tuple(range(0, p, 2)), (0, 1)) if p > 2 else ()
    yield Routes(n, tuple(dict.fromkeys(pairs)), True, plan.placement, ties)


@for_each("n", [1, 2, 3, 4, 8])
def test_all_small_programs_pass_the_loss_in_order_and_end(n: int) -> None:
    for m in (1, 2, 3, 8):
        for name, plan in plans(n, m):
            for routes in routes_of(plan):
                with case(f"{name}, m={m}, n={n}, skips={routes.skips}"):
                    made = [program(plan, routes, stage, has_loss=True) for stage in range(n)]
                    check_passed_once(made, routes)
                    check_order(made, routes)
                    assert run_unbuffered(made, routes) == list(map(len, made))


def check_passed_once(made: Sequence[Program], routes: Routes) -> None:
    """Each stage but the last partition's receives the loss once."""
    last = routes.placement[-1]
    for stage, steps in enumerate(made):
        received = [step.transfer.payload for step in steps if isinstance(step, Receive)]
        assert received.count(LOSS) == (stage != last)


def check_order(made: Sequence[Program], routes: Routes) -> None:
    """Two stages send and receive all that goes from one to the other in the same order.

    So one queue from rank to rank is enough for all channels between them.
    """
    for source, steps in enumerate(made):
        for destination, others in enumerate(made):
            between = source, destination
            assert between_stages(Send, steps, between, routes) == between_stages(
                Receive, others, between, routes
            )


def between_stages(
    kind: type[Send | Receive], steps: Program, between: tuple[int, int], routes: Routes
) -> list[Transfer]:
    found = [step.transfer for step in steps if isinstance(step, kind)]
    return [transfer for transfer in found if routes.stages_of(transfer) == between]


def run_unbuffered(made: Sequence[Program], routes: Routes) -> list[int]:
    """Run programs where a send waits for its receive; return how many steps each has done.

    As ``proof.deadlocks``, which does not see the loss: a stage passes on what it has received.
    """
    into = {routes.stages_of(hop)[1]: hop for hop in routes.loss_hops}
    done = [0] * len(made)
    sent: set[Transfer] = set()
    posted: set[Transfer] = set()
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, steps in enumerate(made):
            for step in steps[done[stage] :]:
                if isinstance(step, Receive):
                    posted.add(step.transfer)
                elif isinstance(step, Run):
                    if not sent.issuperset(routes.needed(step.task)):
                        break
                else:
                    waits = step.transfer.payload == LOSS and stage in into
                    if step.transfer not in posted or (waits and into[stage] not in sent):
                        break
                    sent.add(step.transfer)
                done[stage] += 1
                goes_on = True
    return done
