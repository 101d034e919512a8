"""List scheduling: makes a plan task by task, from costs and memory limits.

Time advances from event to event: a task ends, or a message arrives. An idle stage then starts the
most urgent task that it can start:

    1  I or B      the previous partition waits for its gradient; oldest micro-batch first
    2  R           no earlier than needed to end when the gradient arrives
    3  F           if the partition's window of micro-batches is not full
    4  W           unless a more urgent task arrives before it would end

    two stages, memory for three micro-batches; F, I and W take equally long, hops take no time

    stage 0   F0 F1 F2 I0 W0 F3 I1 W1 …
    stage 1      F0 I0 F1 I1 F2 I2 W0 …

**Windows.** The window of a partition is the number of micro-batches between their forward and
their backward there. It suffices to have as many as arrive during the *round trip* of one
micro-batch to the last partition and back: the round trip divided by the *period*, which is the
time of the slowest stage for a micro-batch. With equal tasks that is 1F1B's ``n - j``. A rule can
widen windows (more forward tasks at the start) or narrow them (less memory).

**Memory.** A task starts only if its own stage, and each stage that it sends to, has room for what
it makes (``room.py``). Stages can still deadlock; the rule then yields no plan. ``one_at_a_time``
needs the least memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from procpipe.plan.costs import Costs
from procpipe.plan.placement import partitions_of
from procpipe.plan.routes import Routes
from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
)
from procpipe.tuning.one_at_a_time import in_cycles
from procpipe.tuning.room import Effects, Room

#: Times that differ by less are equal: sums in another order differ in their last digits.
_SAME_S = 1e-12


@dataclass(frozen=True)
class ListRule:
    """How stages choose their next task."""

    in_two: bool = False  # whether backward is split in I and W
    window: int | None = 0  # what is added to the windows; None for no windows
    #: A task does not start if a more urgent one arrives within this share of its time.
    patience: float = 0.0
    #: Whether, among equally urgent tasks, later partitions come first; otherwise older
    #: micro-batches.
    deep_first: bool = True


def list_schedule(
    m: int,
    costs: Costs,
    routes: Routes,
    *,
    recompute: Collection[int] = (),
    limits_bytes: Sequence[int] | None = None,
    rule: ListRule = ListRule(),
    effects: Effects | None = None,
) -> Plan | None:
    """Plan a whole mini-batch; None if the rule yields no plan within the limits.

    The arguments are those of ``search.candidates``, and how stages choose. ``effects``, of the
    same costs, routes and ``rule.in_two``, are used with limits only, and made if left out.

    Raises:
        ValueError: a micro-batch to recompute does not exist.
    """
    if strangers := sorted(set(recompute) - set(range(m))):
        raise ValueError(f"cannot recompute micro-batches {strangers}: there are {m}, from 0")
    room = None
    if limits_bytes is not None:
        effects = effects or Effects(costs, routes, in_two=rule.in_two)
        room = Room(effects, routes, limits_bytes)
    order = _ListScheduler(m, costs, routes, frozenset(recompute), rule, room).run()
    return None if order is None else in_cycles(m, order, routes)


def windows(m: int, costs: Costs, placement: Sequence[int], rule: ListRule) -> list[int]:
    """Return each partition's window; see the module docstring."""
    p = len(placement)
    if rule.window is None:
        return [m] * p
    backward = (INPUT_GRADIENT, WEIGHT_GRADIENT) if rule.in_two else (BACKWARD,)
    gradient_s = costs.seconds[backward[0]]
    tasks_s = (costs.seconds[kind] for kind in (FORWARD, *backward))
    whole_s = [math.fsum(of_partition) for of_partition in zip(*tasks_s, strict=True)]
    period_s = max(
        math.fsum(whole_s[j] for j in partitions_of(placement, stage))
        for stage in range(max(placement) + 1)
    )
    hops_s = (*costs.hops_s(placement), 0.0)
    found = [0] * p
    trip_s = 0.0
    for j in reversed(range(p)):
        trip_s += costs.forward_s[j]
        num = math.ceil(trip_s / period_s - 1e-9) if period_s else 1
        found[j] = max(1, min(m, num + rule.window))
        trip_s += gradient_s[j] + (2 * hops_s[j - 1] if j else 0.0)
    return found


class _ListScheduler:
    def __init__(
        self,
        m: int,
        costs: Costs,
        routes: Routes,
        recompute: frozenset[int],
        rule: ListRule,
        room: Room | None,
    ) -> None:
        self._m = m
        self._rule = rule
        self._recompute = recompute
        self._placement = placement = routes.placement
        n, p = routes.num_stages, len(placement)
        self._parts = [partitions_of(placement, stage) for stage in range(n)]
        self._windows = windows(m, costs, placement, rule)
        self._gradient = INPUT_GRADIENT if rule.in_two else BACKWARD
        self._seconds = costs.seconds
        self._hops_s = (*costs.hops_s(placement), 0.0)
        self._room = room
        # By partition: when each micro-batch's task of the kind ends; how many there are.
        self._ends_s: dict[str, list[list[float]]] = {
            kind: [[] for _ in range(p)]
            for kind in (FORWARD, RECOMPUTE, self._gradient, WEIGHT_GRADIENT)
        }
        self._free_s = [0.0] * n
        self._waiting: list[set[int]] = [set() for _ in range(n)]  # for room at this stage
        self._events: list[tuple[float, int]] = [(0.0, stage) for stage in range(n)]
        self._order: list[Task] = []

    def run(self) -> list[Task] | None:
        """Return all tasks in the order of their starts; None if stages deadlock."""
        num_kinds = 3 if self._rule.in_two else 2
        num_tasks = (num_kinds * self._m + len(self._recompute)) * len(self._placement)
        events = self._events
        while events:
            now_s, stage = heapq.heappop(events)
            while events and events[0] == (now_s, stage):
                heapq.heappop(events)
            if self._free_s[stage] <= now_s:
                self._look(stage, now_s)
        return self._order if len(self._order) == num_tasks else None

    def _look(self, stage: int, now_s: float) -> None:
        """Start the best task that an idle stage can start."""
        best: tuple[tuple[int, int, int], Task] | None = None
        later: list[tuple[int, float]] = []
        for urgency, task, ready_s in self._candidates(stage):
            if ready_s > now_s + _SAME_S:
                later.append((urgency, ready_s))
                continue
            _, i, j = task
            key = (urgency, -j, i) if self._rule.deep_first else (urgency, i, -j)
            if best is not None and best[0] <= key:
                continue
            again = task.i in self._recompute
            lacking = None if self._room is None else self._room.lacking(task, again)
            if lacking is None:
                best = key, task
            else:
                self._waiting[lacking].add(stage)
        wake_s = min((ready_s for _, ready_s in later), default=math.inf)
        if best is not None:
            (urgency, _, _), task = best
            better_s = min((s for u, s in later if u < urgency), default=math.inf)
            if better_s >= now_s + self._rule.patience * self._seconds[task.kind][task.j]:
                self._start(stage, task, now_s)
                return
        if wake_s < math.inf:
            heapq.heappush(self._events, (wake_s, stage))

    def _candidates(self, stage: int) -> list[tuple[int, Task, float]]:
        """List what a stage may start next: the urgency, the task, and from when."""
        found: list[tuple[int, Task, float]] = []
        forward, gradient = self._ends_s[FORWARD], self._ends_s[self._gradient]
        for j in self._parts[stage]:
            f, b, w = len(forward[j]), len(gradient[j]), len(self._ends_s[WEIGHT_GRADIENT][j])
            if b < f:
                found += self._backward_candidate(b, j)
            if f < self._m and f - b < self._windows[j]:
                ready_s = 0.0
                if j:
                    made = forward[j - 1]
                    ready_s = made[f] + self._hops_s[j - 1] if f < len(made) else math.inf
                if ready_s < math.inf:
                    found.append((2, Task(FORWARD, f, j), ready_s))
            if self._rule.in_two and w < b:
                found.append((3, Task(WEIGHT_GRADIENT, w, j), 0.0))
        return found

    def _backward_candidate(self, b: int, j: int) -> list[tuple[int, Task, float]]:
        ready_s = 0.0
        if j < len(self._placement) - 1:
            made = self._ends_s[self._gradient][j + 1]
            if b >= len(made):
                return []
            ready_s = made[b] + self._hops_s[j]
        if b in self._recompute:
            num_before = sum(1 for i in range(b) if i in self._recompute)
            if len(self._ends_s[RECOMPUTE][j]) == num_before:
                start_s = ready_s - self._seconds[RECOMPUTE][j]
                return [(1, Task(RECOMPUTE, b, j), start_s)]
        return [(0, Task(self._gradient, b, j), ready_s)]

    def _start(self, stage: int, task: Task, now_s: float) -> None:
        kind, i, j = task
        end_s = now_s + self._seconds[kind][j]
        if self._room is not None:
            self._room.start(task, i in self._recompute)
        self._order.append(task)
        self._ends_s[kind][j].append(end_s)
        self._free_s[stage] = end_s
        events = self._events
        heapq.heappush(events, (end_s, stage))
        for other in self._waiting[stage]:
            heapq.heappush(events, (now_s, other))
        self._waiting[stage].clear()
        # The receiver may start when this arrives, or recompute so as to end when it arrives.
        if kind == FORWARD and j + 1 < len(self._placement):
            heapq.heappush(events, (end_s + self._hops_s[j], self._placement[j + 1]))
        elif kind == self._gradient and j > 0:
            before = self._placement[j - 1]
            come_s = end_s + self._hops_s[j - 1]
            if i in self._recompute:
                soon_s = max(now_s, come_s - self._seconds[RECOMPUTE][j - 1])
                heapq.heappush(events, (soon_s, before))
            heapq.heappush(events, (come_s, before))
