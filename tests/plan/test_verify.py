"""Every kind of corruption of a plan is reported, at every place."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.errors import PlanError
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe, recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Cycle, Plan, Task
from procpipe.plan.verify import _cycles_of, _is_sound, _order_faults, _task_faults, verify
from tests.cases import for_each
from tests.plan.proof import before


def faults_of(plan: Plan, routes: Routes) -> list[str]:
    with pytest.raises(PlanError) as caught:
        verify(plan, routes)
    return list(caught.value.faults)


def faults_in(text: str, routes: Routes | None = None) -> list[str]:
    plan = Plan.from_text("\n".join(line.strip() for line in text.strip().splitlines()))
    return faults_of(plan, routes or Routes(plan.num_stages))


# Plans that can run -------------------------------------------------------------------------


def test_a_large_plan_is_verified_quickly() -> None:
    plan = gpipe(64, 64, recompute=recomputed("except_last", 64))
    start_s = time.process_time()
    verify(plan, Routes(64, ((0, 63), (3, 40))))
    assert time.process_time() - start_s < 5  # 0.2 s on a quiet machine


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


def test_a_recomputation_needs_its_backward() -> None:
    assert faults_in("plan m=1 n=1\nF0@0\nR0@0") == [
        "the plan must have B0@0, or I0@0 and W0@0, but has none of them"
    ]


def test_a_plan_without_tasks_is_refused() -> None:
    assert faults_in("plan m=1 n=1") == ["the plan has no tasks"]


def test_a_task_of_an_unknown_kind_is_reported() -> None:
    plan = Plan(1, 1, ((Task("F", 0, 0),), (Task("B", 0, 0),), (Task("Z", 0, 0),)))
    (fault,) = faults_of(plan, Routes(1))
    assert fault.startswith("Z0@0 does not exist: there are F, R, B, I, W of 1 micro-batches")


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
def test_a_dropped_task_is_reported(plan: Plan) -> None:
    for k, p in places(plan):
        task = plan.cycles[k][p]
        if task.kind == "R":  # the plan that does not recompute here is valid
            verify(edited(plan, (k, p, ())), Routes(plan.num_stages))
        else:
            faults = faults_of(edited(plan, (k, p, ())), Routes(plan.num_stages))
            assert any(f"{task} is missing" in f or f"must have {task}" in f for f in faults)


@for_each("plan", SMALL)
def test_a_doubled_task_is_reported(plan: Plan) -> None:
    for k, p in places(plan):
        task = plan.cycles[k][p]
        doubled = edited(plan, (k, p, (task, task)))
        assert f"{task} comes 2 times, in cycles {k}, {k}" in faults_of(
            doubled, Routes(plan.num_stages)
        )
        again = Plan(plan.num_micro_batches, plan.num_stages, [*plan.cycles, (task,)])
        assert f"{task} comes 2 times, in cycles {k}, {len(plan.cycles)}" in faults_of(
            again, Routes(plan.num_stages)
        )


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


# The check in one pass ----------------------------------------------------------------------

SPLIT = [
    *SMALL[:3],
    *(
        SCHEDULES[name].plan(2, SCHEDULES[name].place(4, 2), {0})
        for name in ("interleaved", "zb-v")
    ),
    SCHEDULES["zb-h1"].plan(3, (0, 1), {0, 1}),
    forward_plan(2, 2),
    backward_plan(2, 2, {0}),
]


@given(plan=st.sampled_from(SPLIT), data=st.data())
def test_one_pass_accepts_exactly_the_plans_without_faults(plan: Plan, data: st.DataObject) -> None:
    """A few tasks are dropped, doubled, moved, or become tasks of another kind or place."""
    m, p = plan.num_micro_batches, plan.num_partitions
    cycles = [list(cycle) for cycle in plan.cycles]
    tasks = st.builds(Task, st.sampled_from("FRBIW"), st.integers(0, m - 1), st.integers(0, p - 1))
    for _ in range(data.draw(st.integers(0, 4))):
        k, goal = (data.draw(st.integers(0, len(cycles) - 1)) for _ in range(2))
        at = data.draw(st.integers(0, len(cycles[k]) - 1)) if cycles[k] else None
        way = data.draw(st.sampled_from(["drop", "move", "replace", "add"]))
        old = cycles[k].pop(at) if at is not None and way != "add" else None
        if way == "move" and old is not None:
            cycles[goal].append(old)
        elif way in ("replace", "add"):
            cycles[goal if way == "add" else k].append(data.draw(tasks))
    changed = Plan(m, plan.num_stages, [tuple(cycle) for cycle in cycles], plan.placement)
    routes = Routes(plan.num_stages, ((0, p - 1),), plan.placement)
    found = _cycles_of(changed)
    faults = [*_task_faults(changed, found), *_order_faults(routes, found)]
    assert _is_sound(changed, routes) == (not faults), (changed.to_text(), faults)


def test_one_pass_pairs_each_weight_task_with_its_own_input_task() -> None:
    assert faults_in("""
        plan m=2 n=1
        F0@0
        F1@0
        B0@0
        W0@0
        I1@0
    """) == [
        "the plan must have B0@0, or I0@0 and W0@0, but has B0@0 and W0@0",
        "the plan must have B1@0, or I1@0 and W1@0, but has I1@0",
    ]
