"""Tasks and plans: their text and their equality."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.plan.schedules.gpipe import forward_plan
from procpipe.plan.task import KINDS, Plan, Task
from tests.cases import for_each

TASKS = st.builds(Task, st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 99))


@for_each("text", ["", "F3", "F@1", "F-1@0", "F3@1 ", "f3@1", "3@1", "X3@1", "F3@1F3@2"])
def test_text_that_is_not_a_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task; one reads like 'F3@1', of the kinds F, R"):
        Task.parse(text)


def test_the_text_of_a_plan_is_one_line_a_cycle() -> None:
    assert forward_plan(2, 2).to_text() == "plan m=2 n=2\nF0@0\nF1@0 F0@1\nF1@1\n"


@given(
    m=st.integers(1, 99),
    n=st.integers(1, 99),
    cycles=st.lists(st.lists(TASKS, max_size=4).map(tuple), max_size=5).map(tuple),
)
def test_any_plan_is_read_from_its_text(m: int, n: int, cycles: tuple[tuple[Task, ...]]) -> None:
    plan = Plan(m, n, cycles)
    again = Plan.from_text(plan.to_text())
    assert (again.num_micro_batches, again.num_stages, again.cycles) == (m, n, cycles)
    assert again == plan
    assert again.digest == plan.digest


@for_each(
    ("text", "fault"),
    [
        ("", "line 1: '' is not a header; one reads like 'plan m=4 n=3'"),
        ("plan m=2", "line 1: 'plan m=2' is not a header"),
        ("plan m=0 n=2", "line 1: a plan needs a micro-batch and a stage, but has m=0 and n=2"),
        ("plan m=2 n=0\n", "line 1: a plan needs a micro-batch and a stage, but has m=2 and n=0"),
        ("plan m=2 n=2\nF0@0\nF1@0 F0\n", "line 3: 'F0' is not a task"),
    ],
)
def test_bad_text_is_refused_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(fault)):
        Plan.from_text(text)
