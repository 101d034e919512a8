"""Programs: one order on all stages, and each receive posted one task ahead."""

from __future__ import annotations

from itertools import pairwise

from procpipe.plan.placement import folded, looped
from procpipe.plan.program import Program, Receive, Run, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import gpipe, recomputed
from tests.cases import for_each
from tests.plan.proof import all_skips, programs
from tests.plan.schedules.grids import SIZES


def text(steps: Program) -> list[str]:
    return [str(step) for step in steps]


def lines(drawing: str) -> list[str]:
    return [line.strip() for line in drawing.strip().splitlines()]


def test_the_program_of_the_last_stage() -> None:
    plan = gpipe(2, 2, recompute=recomputed("except_last", 2))
    assert text(program(plan, Routes(2), 1, has_loss=True)) == lines("""
        receive activation 0: 0->1
        receive activation 1: 0->1
        run F0@1
        run F1@1
        run B1@1
        send gradient 1: 1->0
        run R0@1
        run B0@1
        send gradient 0: 1->0
        send loss 0: 1->0
    """)


@for_each(("m", "n"), SIZES)
def test_a_receive_is_posted_before_the_task_that_precedes_its_use(m: int, n: int) -> None:
    routes = Routes(n, all_skips(n))
    for steps in programs(gpipe(m, n, recompute={0}), routes):
        place = {step: index for index, step in enumerate(steps)}
        runs = [step.task for step in steps if isinstance(step, Run)]
        for before, task in pairwise(runs):
            for transfer in routes.needed(task):
                assert place[Receive(transfer)] < place[Run(before)]


# -- the loss: to every stage, behind its last gradient, in the same order at both ends ----------


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
