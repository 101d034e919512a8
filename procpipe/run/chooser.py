"""Which plan a training step runs: always the schedule's, or one that is chosen by measurements.

PURE: no sockets, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.named import Schedule
from procpipe.plan.task import Plan


@dataclass(frozen=True)
class Choice:
    """The plan of the next training step."""

    plan: Plan  # the plan
    schedule: str = ""  # the plan's name, for people; "" where the schedule has only one
    measure: str = ""  # what every rank measures in the step (see ``tuning.auto``); "" for nothing
    name: str = ""  # the plan's name among those that were considered


class Chooser(Protocol):
    """Chooses the plan of each training step, on rank 0."""

    def choose(
        self, m: int, input_bytes: int, recompute: Collection[int], routes: Routes
    ) -> Choice:
        """Choose the plan of the next training step.

        Args:
            m: the number of micro-batches.
            input_bytes: the model's input of the largest micro-batch.
            recompute: the micro-batches that the user wants recomputed.
            routes: where tensors go in this step.

        Raises:
            MemoryLimitError: no plan keeps to the memory allowed.
        """

    def like(self, choice: Choice, m: int, recompute: Collection[int], routes: Routes) -> Plan:
        """Return the plan of a replica whose micro-batches are others, like one just chosen."""


def choose_for_all(
    chooser: Chooser, cases: Sequence[tuple[int, Collection[int]]], input_bytes: int, routes: Routes
) -> tuple[Choice, list[Plan | None]]:
    """Choose one plan for all replicas, by the one with the most micro-batches.

    ``cases``: of each replica, the number of micro-batches, and which of them are recomputed.

    Returns:
        The choice, and the plan of each replica: the same, one like it where its micro-batches are
        others, or None where it has none.
    """
    case = max(cases, key=lambda each: each[0])
    choice = chooser.choose(case[0], input_bytes, case[1], routes)
    return choice, [
        choice.plan if each == case else chooser.like(choice, *each, routes) if each[0] else None
        for each in cases
    ]


class FixedSchedule:
    """Chooses a schedule's plan, which depends on the number of micro-batches only."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._choices: dict[tuple[int, frozenset[int]], Choice] = {}

    def choose(
        self, m: int, input_bytes: int, recompute: Collection[int], routes: Routes
    ) -> Choice:
        """Return the schedule's plan."""
        key = m, frozenset(recompute)
        if key not in self._choices:
            self._choices[key] = Choice(self._schedule.plan(m, routes.placement, recompute))
        return self._choices[key]

    def like(self, choice: Choice, m: int, recompute: Collection[int], routes: Routes) -> Plan:
        """Return the schedule's plan."""
        return self.choose(m, 0, recompute, routes).plan
