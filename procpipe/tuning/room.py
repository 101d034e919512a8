"""The memory that list scheduling counts: a task starts only where there is room for what it makes.

Bytes are counted as in ``procpipe/plan/memory.py``, on the task's own stage and on each stage that
it sends to. Each stage reserves memory for one whole micro-batch:

    limit   |··· others ···|········ the oldest micro-batch ········|
                            what it holds now, and the rest that it will need

Only the oldest micro-batch without a backward on the stage may use the reserve, so that stages
cannot fill up with micro-batches that cannot continue. ``W`` only frees memory, so what a pending
``W`` will free counts as free.

A message counts from the start of the receiver's current task, where its buffer is posted; that
task's own bytes are freed only when the next one starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from procpipe.plan.costs import Costs
from procpipe.plan.memory import Holdings, all_peak_bytes, message_bytes
from procpipe.plan.placement import partitions_of
from procpipe.plan.routes import Routes
from procpipe.plan.task import INPUT_GRADIENT, WEIGHT_GRADIENT, Plan, Task
from procpipe.tuning.one_at_a_time import one_at_a_time


class _Effect(NamedTuple):
    """The bytes that a task takes, frees and sends to other stages."""

    taken: int
    given_back: int
    messages: tuple[tuple[int, int], ...]  # each a stage and the bytes of all that it is sent


class Effects:
    """What each task takes, frees and sends: of a model, the same for all rules and limits."""

    def __init__(self, costs: Costs, routes: Routes, *, in_two: bool) -> None:
        # Gradients of tied parameters may arrive at any time, and stay to the end.
        self.tied_bytes = [0] * routes.num_stages
        for stage, others in routes.tied_with.items():
            for other in others:
                self.tied_bytes[stage] += costs.tied_between((stage, other), routes.placement)[0]
        routes = replace(routes, ties=())
        # Copies for the all-reduce are held when little else is.
        costs = replace(costs, buckets=())
        #: By whether the micro-batch is recomputed, the task's kind and its partition.
        self.of_task: dict[tuple[bool, str, int], _Effect] = {}
        self.apart_bytes = [0] * routes.num_stages  # what each stage holds of one micro-batch alone
        for again in (False, True):
            plan = one_at_a_time(1, routes, recompute=range(again), in_two=in_two)
            for stage, peak in enumerate(all_peak_bytes(plan, costs, routes)):
                self.apart_bytes[stage] = max(self.apart_bytes[stage], peak)
                self._note(again, stage, plan, costs, routes)

    def _note(self, again: bool, stage: int, plan: Plan, costs: Costs, routes: Routes) -> None:
        holdings = Holdings(plan, costs, routes, stage)
        for task in plan.tasks_of(stage):
            messages: Counter[int] = Counter()
            for transfer in routes.leaving(task):
                messages[routes.stages_of(transfer)[1]] += message_bytes(transfer, costs, routes)
            sizes = tuple((to, size) for to, size in messages.items() if size)
            effect = _Effect(holdings.taken(task), holdings.given_back(task), sizes)
            self.of_task[again, task.kind, task.j] = effect


class Room:
    """The bytes that each stage holds, and whether there is room for more."""

    def __init__(self, effects: Effects, routes: Routes, limits_bytes: Sequence[int]) -> None:
        n = routes.num_stages
        self._placement = routes.placement
        sizes = zip(limits_bytes, effects.tied_bytes, strict=True)
        self._limits = [limit - tied for limit, tied in sizes]
        self._effects = effects.of_task
        self._apart = effects.apart_bytes
        self._held = [0] * n  # what each stage holds, that of its last task included
        self._leaving = [(0, 0)] * n  # of that, what its last task frees: micro-batch, bytes
        self._of: list[dict[int, int]] = [{} for _ in range(n)]  # of that, by micro-batch
        self._put_off = [0] * n  # of that, what W will free
        self._num_back = [0] * len(routes.placement)  # backward tasks that were started
        self._parts = [partitions_of(routes.placement, stage) for stage in range(n)]

    def lacking(self, task: Task, again: bool) -> int | None:
        """Return a stage without room for what a task makes; None if all have room."""
        effect = self._effects[again, task.kind, task.j]
        here = self._placement[task.j]
        if effect.taken and not self._has_room(here, task.i, effect.taken, is_start=True):
            return here
        for stage, size in effect.messages:
            if not self._has_room(stage, task.i, size, is_start=False):
                return stage
        return None

    def _has_room(self, stage: int, i: int, size: int, *, is_start: bool) -> bool:
        limit, total = self._limits[stage], self._held[stage] + size
        oldest = min([self._num_back[j] for j in self._parts[stage]])
        of_oldest = self._of[stage].get(oldest, 0)
        if is_start:
            whose, leaving = self._leaving[stage]
            total -= leaving
            if whose == oldest:
                of_oldest -= leaving
        if total > limit:
            return False
        if i == oldest:
            return True
        return total - of_oldest - self._put_off[stage] <= limit - self._apart[stage]

    def start(self, task: Task, again: bool) -> None:
        """Count what a task takes, and what the task before it has freed."""
        kind, i, j = task
        effect = self._effects[again, kind, j]
        stage = self._placement[j]
        whose, leaving = self._leaving[stage]
        self._add(stage, whose, -leaving)
        self._add(stage, i, effect.taken)
        self._leaving[stage] = i, effect.given_back
        if task.makes_gradient:
            self._num_back[j] += 1
        if kind == INPUT_GRADIENT:
            self._put_off[stage] += self._effects[again, WEIGHT_GRADIENT, j].given_back
        elif kind == WEIGHT_GRADIENT:
            self._put_off[stage] -= effect.given_back
        for stage, size in effect.messages:
            self._add(stage, i, size)

    def _add(self, stage: int, i: int, size: int) -> None:
        if size:
            self._held[stage] += size
            of = self._of[stage]
            of[i] = of.get(i, 0) + size
