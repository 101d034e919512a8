"""Every kind of corruption of a plan is reported, at every place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from procpipe.errors import PlanError
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe, recomputed
from procpipe.plan.task import Cycle, Plan, Task
from procpipe.plan.verify import verify
from tests.cases import for_each
from tests.plan.proof import before


def faults_of(plan: Plan, routes: Routes) -> list[str]:
    with pytest.raises(PlanError) as caught:
        verify(plan, routes)
    return list(caught.value.faults)


def faults_in(text: str, routes: Routes | None = None) -> list[str]:
    plan = Plan.from_text("\n".join(line.strip() for line in text.strip().splitlines()))
    return faults_of(plan, routes or Routes(plan.num_stages))


# Literal faults -----------------------------------------------------------------------------


def test_all_faults_of_a_plan_are_reported_at_once() -> None:
    assert faults_in("""
        plan m=2 n=2
        F0@0 F1@0
        F0@1 F5@1 F0@7
        F0@1
    """) == [
        "F0@1 comes 2 times, in cycles 1, 2",
        "F5@1 does not exist: there are F, R, B, I, W of 2 micro-batches in 2 partitions, "
        "each from 0",
        "F0@7 does not exist: there are F, R, B, I, W of 2 micro-batches in 2 partitions, "
        "each from 0",
        "stage 0 has 2 tasks in cycle 0: F0@0 and F1@0",
        "stage 1 has 2 tasks in cycle 1: F0@1 and F5@1",
        "F1@1 is missing",
    ]


def test_inputs_must_be_made_in_an_earlier_cycle() -> None:
    assert faults_in("plan m=1 n=2\nF0@0 F0@1") == [
        "F0@1 in cycle 0 needs 'activation 0: 0->1', which F0@0 makes in cycle 0"
    ]
    assert faults_in("plan m=1 n=2\nB0@0\nB0@1") == [
        "B0@0 in cycle 0 needs 'gradient 0: 1->0', which B0@1 makes in cycle 1"
    ]
    assert faults_in("plan m=1 n=1\nB0@0\nR0@0\nF0@0") == [
        "B0@0 in cycle 0 needs F0@0, which is in cycle 2",
        "B0@0 in cycle 0 needs R0@0, which is in cycle 1",
        "R0@0 in cycle 1 needs F0@0, which is in cycle 2",
    ]


def test_skip_tensors_and_their_gradients_must_be_made_in_an_earlier_cycle() -> None:
    skips = Routes(3, ((0, 2),))
    assert faults_in("plan m=1 n=3\nF0@2\nF0@0\nF0@1", skips) == [
        "F0@2 in cycle 0 needs 'activation 0: 1->2', which F0@1 makes in cycle 2",
        "F0@2 in cycle 0 needs 'skip 0: 0->2', which F0@0 makes in cycle 1",
    ]
    assert faults_in("plan m=1 n=3\nB0@0\nB0@2\nB0@1", skips) == [
        "B0@0 in cycle 0 needs 'gradient 0: 1->0', which B0@1 makes in cycle 2",
        "B0@0 in cycle 0 needs 'skip gradient 0: 2->0', which B0@2 makes in cycle 1",
    ]


def test_a_recomputation_needs_its_backward_and_a_plan_tasks() -> None:
    assert faults_in("plan m=1 n=1\nF0@0\nR0@0") == [
        "the plan must have B0@0, or I0@0 and W0@0, but has none of them"
    ]
    assert faults_in("plan m=1 n=1") == ["the plan has no tasks"]


# Corrupted plans, at every place ------------------------------------------------------------

SMALL = [gpipe(m, n, recompute=recomputed("except_last", m)) for m in (1, 2, 3) for n in (2, 3)]
SMALL += [forward_plan(2, 3), backward_plan(2, 3, {0, 1})]


def places(plan: Plan) -> Iterator[tuple[int, int]]:
    return ((k, p) for k, cycle in enumerate(plan.cycles) for p in range(len(cycle)))


def edited(plan: Plan, *changes: tuple[int, int, Sequence[Task]]) -> Plan:
    """Put other tasks in the place of the ``p``-th task of cycle ``k``, for each change."""
    cycles: list[list[Sequence[Task]]] = [[(task,) for task in cycle] for cycle in plan.cycles]
    for k, p, tasks in changes:
        cycles[k][p] = tasks
    flat: list[Cycle] = [tuple(task for part in cycle for task in part) for cycle in cycles]
    return Plan(plan.num_micro_batches, plan.num_stages, flat)


def can_run(plan: Plan) -> bool:
    """Check the order of tasks, without the code under test."""
    todo = set(plan.tasks())
    for cycle in plan.cycles:
        if any(before(task) & todo for task in cycle):
            return False
        todo -= {*cycle}
    return all(len({task.j for task in cycle}) == len(cycle) for cycle in plan.cycles)


@for_each("plan", SMALL)
def test_swapped_tasks_are_reported_exactly_if_they_cannot_run(plan: Plan) -> None:
    verdicts = set()
    for first, second in combinations(places(plan), 2):
        tasks = plan.cycles[first[0]][first[1]], plan.cycles[second[0]][second[1]]
        swapped = edited(plan, (*first, tasks[1:]), (*second, tasks[:1]))
        verdicts.add(can_run(swapped))
        if can_run(swapped):
            verify(swapped, Routes(plan.num_stages))
        else:
            faults = "\n".join(faults_of(swapped, Routes(plan.num_stages)))
            assert str(tasks[0]) in faults or str(tasks[1]) in faults
    assert False in verdicts
