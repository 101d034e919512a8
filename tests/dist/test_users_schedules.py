"""A user's own schedule: plans that are wrong, fail later or differ between ranks; bad balances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from procpipe.errors import DisagreementError, PlanError, RemoteStageError
from procpipe.plan.task import Plan
from tests.dist.stages import in_a_fold, in_a_loop, two_at_a_time, world_of

pytestmark = pytest.mark.on_gpus


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()


def valid_for_one(m: int, n: int) -> Plan:
    """A user's plan that is valid for one micro-batch only."""
    if m == 2:
        raise ZeroDivisionError("no plan for two")
    plan = two_at_a_time(m, n)
    return plan if m == 1 else Plan(m, n, tuple(reversed(plan.cycles)))


def fail_later(bare: Any, size: int) -> tuple[str, str]:
    data = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
    options: Any = {"schedule": valid_for_one, "loss_fn": F.cross_entropy}
    stage = Stage(make_model(), [2, 2], world=world_of(bare, f"{size}"), **options)
    stage.step(*data)
    stage.chunks = size
    with pytest.raises((ZeroDivisionError, PlanError, RemoteStageError)) as caught:
        stage.step(*data)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (2, "ZeroDivisionError", "no plan for two"),
        (3, "PlanError", "F0@1 in cycle"),
    ],
)
def test_a_users_schedule_that_fails_later_ends_all_ranks(ranks, size, error, message):
    (origin, text), (victim, report) = ranks(2).run(fail_later, size, world=False).values()
    assert (origin, victim) == (error, "RemoteStageError")
    assert message in text
    assert f"stage 0 (rank 0), in step(): {error}" in report
    assert message in report


def differ(bare: Any) -> str:
    """Use functions that place the layers differently on the two ranks."""
    schedule = in_a_loop if bare.rank == 0 else in_a_fold
    options: Any = {"schedule": schedule, "loss_fn": F.cross_entropy}
    stage = Stage(make_model(), [1, 1, 1, 1], world=world_of(bare, "differ"), **options)
    with pytest.raises(DisagreementError) as caught:
        stage.step(torch.randn(5, 5, dtype=torch.float64), torch.randint(3, (5,)))
    return str(caught.value)


def test_users_schedules_that_differ_between_ranks_are_reported_on_all(ranks):
    for message in ranks(2).run(differ, world=False).values():
        assert "placement is [0, 1, 0, 1] on rank 0 and [0, 1, 1, 0] on rank 1" in message
