"""Where the gradients of tied parameters go: once a plan, after the last task that adds to them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest

from procpipe.errors import PlanError
from procpipe.plan.program import Run, Send
from procpipe.plan.routes import TIED_GRADIENT, Routes, Transfer
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import BACKWARD, WEIGHT_GRADIENT
from procpipe.planner.costs import Costs
from procpipe.planner.memory import held_bytes
from procpipe.planner.simulation import simulate
from tests.plan.proof import programs, prove


def plans():
    """Yield plans of every schedule, each with a set of ties between its partitions."""
    for name, schedule in SCHEDULES.items():
        for n in range(1, 5):
            p = schedule.count(n)
            placement = schedule.place(p, n)
            sets = [(0, p - 1), tuple(range(0, p, 2)), *list(combinations(range(p), 2))[:3]]
            ties = tuple(dict.fromkeys(tie for tie in sets if len(set(tie)) > 1))
            routes = Routes(n, target=True, placement=placement, ties=ties)
            for m in (1, 2, 5):
                yield f"{name} m={m} n={n}", schedule.plan(m, placement, ()), routes


def test_every_small_plan_sends_each_gradient_once_after_the_last_task_that_adds_to_it():
    for name, plan, routes in plans():
        sent: Counter[tuple[int, int]] = Counter()
        for stage, steps in enumerate(programs(plan, routes)):
            for place, step in enumerate(steps):
                if isinstance(step, Send) and step.transfer.payload == TIED_GRADIENT:
                    _, other = routes.stages_of(step.transfer)
                    sent[stage, other] += 1
                    shared = {
                        j
                        for tie in routes.ties
                        if other in {routes.placement[k] for k in tie}
                        for j in tie
                        if routes.placement[j] == stage
                    }
                    later = [step.task for step in steps[place:] if isinstance(step, Run)]
                    added = [t for t in later if t.kind in (BACKWARD, WEIGHT_GRADIENT)]
                    assert not shared & {t.j for t in added}, name
        of_ties = [{routes.placement[j] for j in tie} for tie in routes.ties]
        pairs = {(a, b) for stages in of_ties for a in stages for b in stages - {a}}
        assert sent == Counter(pairs), name


def test_a_forward_plan_sends_none_and_a_backward_plan_does():
    routes = Routes(3, ties=((0, 2),))
    for plan, expected in ((forward_plan(2, 3), 0), (backward_plan(2, 3, ()), 2)):
        steps = [step for steps in programs(plan, routes) for step in steps]
        tied = [
            step
            for step in steps
            if isinstance(step, Send) and step.transfer.payload == TIED_GRADIENT
        ]
        assert len(tied) == expected


def test_sending_too_early_is_found():
    plan, routes = gpipe(2, 2), Routes(2, ties=((0, 1),))
    first, second = programs(plan, routes)
    tied = Send(Transfer(TIED_GRADIENT, 0, 1, 0))
    assert tied in second
    rest = [step for step in second if step != tied]
    last = max(k for k, step in enumerate(rest) if isinstance(step, Run))
    early = (*rest[:last], tied, *rest[last:])

    with pytest.raises(PlanError, match=r"stage 1 sends 'tied gradient 0: 1->0' before B0@1 has"):
        prove(plan, routes, (first, early))


def test_a_gradient_counts_until_the_end():
    costs = Costs.uniform(2, output_bytes=10)
    costs = Costs(**{**vars(costs), "tied_bytes": {(0, 1): 1000}, "tied_s": {(0, 1): 5.0}})
    plan, routes = gpipe(2, 2), Routes(2, ties=((0, 1),))
    for stage in (0, 1):
        held = list(held_bytes(plan, costs, routes, stage))
        assert max(held) >= 1000
        assert held[-1] == 0
        without = list(held_bytes(plan, costs, Routes(2), stage))
        assert max(without) < 1000
    # The last task of all is a backward that adds to the gradient.
    assert math.isclose(simulate(plan, costs).total_s, simulate(plan, costs, routes).total_s - 5.0)
