"""Where the loss goes: to every stage, ahead of a gradient, in the same order at both ends."""

from __future__ import annotations

from procpipe.plan.placement import folded, looped
from procpipe.plan.program import program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import forward_plan, gpipe
from procpipe.plan.task import Plan


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
