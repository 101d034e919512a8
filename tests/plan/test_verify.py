"""Every kind of fault of a plan is reported; plans without any are accepted: test_proof.py."""

from __future__ import annotations

import pytest

from procpipe.errors import PlanError
from procpipe.plan.routes import Routes
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify


def faults_of(plan: Plan, routes: Routes) -> list[str]:
    with pytest.raises(PlanError) as caught:
        verify(plan, routes)
    return list(caught.value.faults)


def faults_in(text: str, routes: Routes | None = None) -> list[str]:
    plan = Plan.from_text("\n".join(line.strip() for line in text.strip().splitlines()))
    return faults_of(plan, routes or Routes(plan.num_stages))


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
