"""Every plan of procpipe's runs to its end, and so does any plan that ``verify`` accepts.

Every kind of corruption of a program is reported, at every place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.errors import PlanError
from procpipe.plan.placement import folded, looped
from procpipe.plan.program import Program, Receive, Run, Send, Step, program
from procpipe.plan.routes import Routes, Transfer
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Cycle, Plan, Task
from tests.cases import for_each
from tests.plan.proof import before, deadlocks, programs, prove
from tests.plan.schedules.grids import SOME_SIZES


def all_skips(n: int) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a in range(n) for b in range(a + 1, n))


def faults_of(plan: Plan, routes: Routes, steps: Sequence[Program]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        prove(plan, routes, steps)
    return list(caught.value.faults)


# Plans that can run -------------------------------------------------------------------------


@for_each(("m", "n"), SOME_SIZES)
def test_every_plan_of_every_schedule_runs_to_its_end(m: int, n: int) -> None:
    for plan in plans(m, n):
        for routes in routes_of(plan):
            prove(plan, routes)


def plans(m: int, n: int) -> Iterator[Plan]:
    """Yield plans of every schedule, of each pass alone, and of placements no schedule makes."""
    for schedule in SCHEDULES.values():
        placements = {schedule.placement(v * n, n) for v in (1, 2, 3)}
        for placement, again in product(placements, ((), range(0, m, 2))):
            plan = schedule.plan(m, placement, again)
            assert plan.placement == placement
            yield plan
    turns = [(*range(n), *turn) for turn in permutations(range(n))] if n < 4 else []
    for placement in (looped(n, n), looped(2 * n, n), folded(2 * n, n), folded(3 * n, n), *turns):
        yield forward_plan(m, n, placement)
        yield backward_plan(m, n, range(0, m, 2), placement)
        yield gpipe(m, n, placement=placement)


def routes_of(plan: Plan) -> Iterator[Routes]:
    """Yield the routes of a plain model, and of one with skips."""
    n, p = plan.num_stages, plan.num_partitions
    yield Routes(n, placement=plan.placement)
    pairs = [pair for pair in ((0, p - 1), (0, 2), (1, p - 1), (0, 1)) if pair[0] < pair[1] < p]
    yield Routes(n, tuple(dict.fromkeys(pairs)), plan.placement)


@given(data=st.data())
def test_any_plan_without_faults_runs_to_its_end(data: st.DataObject) -> None:
    """Users' plans: any placement, any order; checked only by ``verify`` when they are run."""
    n, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    more = data.draw(st.lists(st.integers(0, n - 1), max_size=4))
    placement = (0, *data.draw(st.permutations([*range(1, n), *more])))
    plan = drawn_plan(data, m, n, placement)
    pairs = all_skips(len(placement))
    skips = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4)) if pairs else []
    prove(plan, Routes(n, tuple(skips), placement))


def drawn_plan(data: st.DataObject, m: int, n: int, placement: tuple[int, ...]) -> Plan:
    """Draw what each stage runs in each cycle, of the tasks whose inputs are there."""
    chance = data.draw(st.randoms(use_true_random=False))
    todo: set[Task] = set()
    for i in range(m):
        for j in range(len(placement)):
            todo |= {Task(kind, i, j) for kind in chance.choice(("FB", "FIW", "FRB", "FRIW"))}
    cycles: list[Cycle] = []
    while todo:
        ready = [task for task in sorted(todo) if not todo & before(task)]
        chance.shuffle(ready)
        of_stages = {placement[task.j]: task for task in ready if chance.random() < 0.7}
        cycles.append(tuple(of_stages.values()))
        todo -= {*of_stages.values()}
    return Plan(m, n, tuple(cycles), placement)


# Corrupted programs, at every place ---------------------------------------------------------

WIRED = Routes(3, ((0, 2),))
PLAN = gpipe(2, 3, recompute={0})
PROGRAMS = programs(PLAN, WIRED)
STEPS = [(stage, p) for stage, steps in enumerate(PROGRAMS) for p in range(len(steps))]
TRANSFER_STEPS = [(s, p) for s, p in STEPS if not isinstance(PROGRAMS[s][p], Run)]


def replaced(stage: int, p: int, *steps: Step) -> list[Program]:
    made = list(PROGRAMS)
    made[stage] = (*made[stage][:p], *steps, *made[stage][p + 1 :])
    return made


def name_of(step: Step) -> str:
    return str(step.task if isinstance(step, Run) else step.transfer)


def verb_of(step: Step) -> str:
    return type(step).__name__.lower()


@for_each(("stage", "p"), STEPS)
def test_a_dropped_step_is_reported(stage: int, p: int) -> None:
    step = PROGRAMS[stage][p]
    faults = faults_of(PLAN, WIRED, replaced(stage, p))
    assert f"stage {stage} does not {verb_of(step)} '{name_of(step)}'" in faults


@for_each(("stage", "p"), STEPS)
def test_a_doubled_step_is_reported(stage: int, p: int) -> None:
    step = PROGRAMS[stage][p]
    faults = faults_of(PLAN, WIRED, replaced(stage, p, step, step))
    assert f"stage {stage} would {verb_of(step)} '{name_of(step)}' 2 times, not 1" in faults


@for_each(("stage", "p"), TRANSFER_STEPS)
def test_a_rerouted_transfer_is_reported(stage: int, p: int) -> None:
    step = PROGRAMS[stage][p]
    assert not isinstance(step, Run)
    kind, i, source, destination = step.transfer
    third = 3 - source - destination
    if isinstance(step, Send):
        wrong: Step = Send(Transfer(kind, i, source, third))
    else:
        wrong = Receive(Transfer(kind, i, third, destination))
    faults = faults_of(PLAN, WIRED, replaced(stage, p, wrong))
    assert f"stage {stage} does not {verb_of(step)} '{name_of(step)}'" in faults
    expected = f"stage {stage} would {verb_of(step)} '{name_of(wrong)}'"
    assert any(fault.startswith(expected) for fault in faults)


@for_each("kind", [Send, Receive])
def test_transfers_that_overtake_are_reported(kind: type[Send | Receive]) -> None:
    num_swaps = 0
    for stage, steps in enumerate(PROGRAMS):
        ours = [(p, step) for p, step in enumerate(steps) if isinstance(step, kind)]
        for (p, first), (q, second) in combinations(ours, 2):
            source, destination = WIRED.stages_of(first.transfer)
            if (source, destination) != WIRED.stages_of(second.transfer):
                continue
            swapped = list(steps)
            swapped[p], swapped[q] = second, first
            faults = faults_of(
                PLAN, WIRED, [*PROGRAMS[:stage], tuple(swapped), *PROGRAMS[stage + 1 :]]
            )
            between = f"to stage {destination}, which receives "
            assert any(f"stage {source} sends" in fault and between in fault for fault in faults)
            num_swaps += 1
    assert num_swaps == 10


def test_tasks_in_another_order_than_the_plan_are_reported() -> None:
    steps = programs(forward_plan(2, 1), Routes(1))[0]
    faults = faults_of(forward_plan(2, 1), Routes(1), [steps[::-1]])
    assert faults == [
        "stage 0 runs F1@0 where the plan has F0@0",
        "stage 0 runs F0@0 where the plan has F1@0",
    ]


def test_a_send_before_its_task_and_a_receive_after_its_use_are_reported() -> None:
    plan, routes = forward_plan(1, 2), Routes(2)
    faults = faults_of(plan, routes, [made[::-1] for made in programs(plan, routes)])
    assert faults == [
        "stage 0 sends 'activation 0: 0->1' before F0@0 has made it",
        "stage 1 sends 'loss 0: 1->0' before F0@1 has made it",
        "stage 1 posts 'activation 0: 0->1' only after F0@1, which needs it",
    ]


def test_a_missing_program_is_reported() -> None:
    plan = gpipe(1, 2)
    steps = programs(plan, Routes(2))[:1]
    assert faults_of(plan, Routes(2), steps) == ["there are 1 programs for 2 stages"]


# Deadlock -----------------------------------------------------------------------------------


def posted_late(steps: Program, routes: Routes) -> Program:
    """Post each receive just before the task that needs it."""
    late: list[Step] = []
    for step in steps:
        if isinstance(step, Run):
            late += [Receive(transfer) for transfer in routes.needed(step.task)]
        if not isinstance(step, Receive):
            late.append(step)
    return tuple(late)


def test_one_forward_one_backward_with_late_receives_is_a_deadlock() -> None:
    routes = Routes(2)
    plan = Plan.from_text("plan m=2 n=2\nF0@0\nF1@0 F0@1\nB0@1\nB0@0 F1@1\nB1@1\nB1@0")
    late = [posted_late(program(plan, routes, stage), routes) for stage in range(2)]
    assert deadlocks(late, routes) == [
        "deadlock:"
        " stage 0 waits at 'send activation 1: 0->1'"
        " until stage 1 reaches 'receive activation 1: 0->1';"
        " stage 1 waits at 'send gradient 0: 1->0'"
        " until stage 0 reaches 'receive gradient 0: 1->0'"
    ]


def test_two_deadlocks_are_distinguished() -> None:
    def crossed(a: int, b: int) -> list[Program]:
        there, back = Transfer("activation", 0, a, b), Transfer("gradient", 0, b, a)
        return [(Send(there), Receive(back)), (Send(back), Receive(there))]

    rings = deadlocks([*crossed(0, 1), *crossed(2, 3)], Routes(4))
    assert [ring.count("waits at") for ring in rings] == [2, 2]
    assert "stage 0 waits" in rings[0]
    assert "stage 2 waits" in rings[1]
