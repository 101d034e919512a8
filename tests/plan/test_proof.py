"""Every plan of procpipe's runs to its end, and so does any plan that ``verify`` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from procpipe.plan.placement import folded, looped
from procpipe.plan.program import Program, Receive, Run, Step, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Cycle, Plan, Task
from tests.cases import for_each
from tests.plan.proof import all_skips, before, deadlocked, prove
from tests.plan.schedules.grids import SOME_SIZES

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
        for k, placement in enumerate(sorted(placements)):
            plan = schedule.plan(m, placement, range(0, m, 2) if (m + n + k) % 2 else ())
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


# A program that cannot run -------------------------------------------------------------------


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

    assert deadlocked(late, routes) == {0: "send activation 1: 0->1", 1: "send gradient 0: 1->0"}
