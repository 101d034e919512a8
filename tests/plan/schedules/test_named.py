"""Schedules by name, and functions of a user's own."""

from __future__ import annotations

import pytest

from procpipe.errors import PlanError
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.named import schedule_of
from procpipe.plan.task import BACKWARD, FORWARD, Plan, Task
from procpipe.plan.verify import verify


def one_too_many(m: int, n: int) -> Plan:
    tasks = [(Task(kind, i, 0),) for kind in (FORWARD, BACKWARD) for i in range(m + 1)]
    return Plan(m + 1, n, tasks)


def backward_first(m: int, n: int) -> Plan:
    return Plan(m, n, [(Task(BACKWARD, i, j),) for i in range(m) for j in range(n)])


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (backward_first, PlanError, "a plan without forward tasks"),
        (one_too_many, PlanError, "a plan of 3 micro-batches and 1 stages"),
        (lambda m, n: "F0@0", TypeError, "returned 'F0@0', but must return a procpipe.plan"),
        (
            "zb",
            ValueError,
            "schedule is 'zb', but must be one of 'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-v'",
        ),
        (7, ValueError, "schedule is 7, but must be one of .*, or a function"),
    ],
)
def test_an_invalid_schedule_is_refused(schedule, error, message):
    with pytest.raises(error, match=message):
        verify(schedule_of(schedule).plan(2, (0,), ()), Routes(1))
