"""Computes when each task of a plan runs, and how long stages idle.

A stage runs its tasks in the order of the plan, each as soon as the stage is free and its inputs
have arrived. Clock cycles do not delay tasks:

    start(i,j) = max(the stage is free, the input has arrived) + the host's seconds
    free       = end(i,j) + seconds of sending what it made to other stages
    arrived    = the same + the seconds of a transfer

    stage 0   [F0][F1]          [──B1──][──B0──]      m = 2, n = 2, no seconds for host and messages
    stage 1       [F0][F1][──B1──][──B0──]
              0   1   2   3     5       7       9

Simplifications: links are never busy; skips and targets, which go straight, never arrive after the
activation, so tasks wait for activations and gradients only. The gradients of shared parameters,
which stages exchange after all tasks, take no time.

With replicas, a stage adds up a partition's gradients over them, in buckets, from the start of its
last B or W task, in which they become final. The last bucket begins after that task. The step ends
with the last of these all-reduces. All replicas are assumed to be as fast as this one:

    stage 0   [F0][F1]          [──B1──][──B0──]A0
    stage 1       [F0][F1][──B1──][──B0──]A0            hidden: stage 0 is still at work

Simulating a task takes a microsecond or less, so thousands of stages are possible. ``memory.py``
counts bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import add

from procpipe.plan.buckets import BUCKET_BYTES
from procpipe.plan.program import last_additions
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
from procpipe.planner.costs import Costs
from procpipe.planner.memory import held_bytes


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each task of a plan starts and ends, from 0 to ``total_s``."""

    plan: Plan
    costs: Costs
    routes: Routes
    total_s: float  # seconds of the step
    exposed_s: float  # the part of it in which only gradients are added up over replicas
    _starts_s: Sequence[float] = field(repr=False)  # in the order of ``plan.tasks()``

    @cached_property
    def spans_s(self) -> Mapping[Task, tuple[float, float]]:
        """When each task starts and ends."""
        seconds = self.costs.seconds
        return {
            task: (start_s, start_s + seconds[task.kind][task.j])
            for task, start_s in zip(self.plan.tasks(), self._starts_s, strict=True)
        }

    @property
    def bubble(self) -> float:
        """The idle share of the time, the mean over all stages, from 0 to 1.

        Includes the time of ``exposed_s``.
        """
        whole_s = self.total_s * self.plan.num_stages
        seconds = self.costs.seconds
        busy_s = math.fsum(seconds[kind][j] for kind, _, j in self.plan.tasks())
        return 1.0 - busy_s / whole_s if whole_s else 0.0

    @property
    def exposed(self) -> float:
        """The share of the time in which only gradients are added up over replicas."""
        return self.exposed_s / self.total_s if self.total_s else 0.0

    def peak_bytes(self, stage: int) -> int:
        """Return the most bytes that a stage holds, as ``memory.py`` counts them."""
        return max(held_bytes(self.plan, self.costs, self.routes, stage))


def simulate(plan: Plan, costs: Costs, routes: Routes | None = None) -> Timeline:
    """Compute when each task of a plan runs.

    Args:
        plan: a plan that verifies.
        costs: what its tasks and transfers cost.
        routes: where its tensors go, for ``peak_bytes``; by default only across boundaries.

    Raises:
        ValueError: costs or routes are for another number of partitions, a task uses what no task
            before it makes, or a stage adds up gradients of a partition that it does not have.
    """
    routes = routes or Routes(plan.num_stages, placement=plan.placement)
    for name, count in (("costs", len(costs.partitions)), ("routes", len(routes.placement))):
        if count != plan.num_partitions:
            what = "stages" if plan.num_partitions == plan.num_stages else "partitions"
            raise ValueError(f"the plan has {plan.num_partitions} {what}, but the {name} {count}")
    starts_s, free_s = _walk(plan, costs)
    if math.isinf(max(free_s)):
        raise ValueError("a task uses what no task before it makes; verify() lists which")
    computed_s = max(free_s)
    summed_s = max(_all_reduces_s(plan, costs, starts_s), default=0.0)
    exposed_s = max(0.0, summed_s - computed_s)
    total_s = computed_s + exposed_s + costs.machine.step_s
    return Timeline(plan, costs, routes, total_s, exposed_s, starts_s)


def _all_reduces_s(plan: Plan, costs: Costs, starts_s: Sequence[float]) -> Iterator[float]:
    """Yield when each all-reduce ends."""
    if costs.num_replicas == 1 or not plan.has_backward:
        return
    start_of = dict(zip(plan.tasks(), starts_s, strict=True))
    for stage in range(plan.num_stages):
        free_s = 0.0
        for j, task in reversed(last_additions(plan.tasks_of(stage)).items()):
            num_bytes = costs.partitions[j].trained_bytes
            whole_s = costs.all_reduce_s(num_bytes)
            last_s = whole_s * min(1.0, BUCKET_BYTES / num_bytes) if num_bytes else 0.0
            final_s = start_of[task] + costs.seconds[task.kind][j]
            free_s = max(final_s + last_s, max(free_s, start_of[task]) + whole_s)
            yield free_s


def _walk(plan: Plan, costs: Costs) -> tuple[list[float], list[float]]:
    """Return when each task starts, and when each stage has ended."""
    placement, p = plan.placement, plan.num_partitions
    # Of each boundary: the message's seconds after its sender is free, 0 within a stage.
    hops_s = [costs.machine.hop_s * (a != b) for a, b in pairwise(placement)]
    hops_s = [0.0, *hops_s, 0.0]
    # By micro-batch and partition, when outputs are made and gradients of inputs; at infinity until
    # known. One place more at either end: what comes from elsewhere, at time 0.
    unknown = [0.0, *[math.inf] * p, 0.0]
    outputs_s = [unknown.copy() for _ in range(plan.num_micro_batches)]
    gradients_s = [unknown.copy() for _ in range(plan.num_micro_batches)]
    if FORWARD not in plan.kinds:  # an earlier plan has run it
        outputs_s = [[0.0] * (p + 2)] * plan.num_micro_batches
    sends_s, host_s = costs.sends_s(placement), costs.machine.host_s
    spent_s = {
        kind: list(map(add, of_kind, sends_s[kind])) for kind, of_kind in costs.seconds.items()
    }
    starts_s: list[float] = []
    free_s = [0.0] * plan.num_stages
    for cycle in plan.cycles:
        for kind, i, j in cycle:
            if kind == FORWARD:
                arrival_s = outputs_s[i][j] + hops_s[j]
            elif kind == RECOMPUTE:
                arrival_s = outputs_s[i][j + 1]
            elif kind == WEIGHT_GRADIENT:
                arrival_s = gradients_s[i][j + 1]
            else:
                arrival_s = gradients_s[i][j + 2] + hops_s[j + 1]
            stage = placement[j]
            start_s = free_s[stage]
            if arrival_s > start_s:
                start_s = arrival_s
            start_s += host_s
            starts_s.append(start_s)
            end_s = free_s[stage] = start_s + spent_s[kind][j]
            if kind == FORWARD:
                outputs_s[i][j + 1] = end_s
            elif kind in (BACKWARD, INPUT_GRADIENT):
                gradients_s[i][j + 1] = end_s
    return starts_s, free_s
