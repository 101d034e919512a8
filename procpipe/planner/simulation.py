"""Computes when each task of a plan runs, and how long stages idle.

A stage runs its tasks in the order of the plan, each as soon as the stage is free and its inputs
have arrived. Clock cycles do not delay tasks:

    start(i,j) = max(end of the task before on j's stage, end of the maker + the hop's seconds)

    stage 0   [F0][F1]          [──B1──][──B0──]      m = 2, n = 2, no seconds a hop
    stage 1       [F0][F1][──B1──][──B0──]
              0   1   2   3     5       7       9

Simplifications: links are never busy; a send takes its stage no time; skips and targets, which go
straight, never arrive after the activation, so tasks wait for activations and gradients only. The
gradients of tied parameters arrive after all tasks; the step ends with the last of them.

With replicas, gradients are added up over them (``all_reduce.py``), each bucket once it is final
and the one before it is done. The step ends with the last of these all-reduces. All replicas are
assumed to be as fast as this one:

    stage 0   [F0][F1]          [──B1──][──B0──]A0 A1
    stage 1       [F0][F1][──B1──][──B0──]A0 A1         hidden: stage 0 is still at work

Simulating a task takes a microsecond or two, so thousands of stages are possible. ``memory.py``
counts bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
from procpipe.planner.all_reduce import AllReduce
from procpipe.planner.costs import Costs
from procpipe.planner.memory import peak_bytes


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each task of a plan starts and ends, from 0 to ``total_s``."""

    plan: Plan
    costs: Costs
    routes: Routes
    total_s: float  # seconds of the step
    exposed_s: float  # the part of it in which only gradients are added up over replicas
    all_reduces: tuple[AllReduce, ...]  # when each stage does that, by stage and in order
    _starts_s: Mapping[Task, float] = field(repr=False)

    def start_s(self, task: Task) -> float:
        """Return when a task starts.

        Raises:
            KeyError: the plan does not have the task.
        """
        if task not in self._starts_s:
            raise KeyError(f"{task} is not in the plan")
        return self._starts_s[task]

    def end_s(self, task: Task) -> float:
        """Return when a task ends.

        Raises:
            KeyError: the plan does not have the task.
        """
        return self.start_s(task) + self.costs.seconds[task.kind][task.j]

    def busy_s(self, stage: int) -> float:
        """Return how long a stage computes."""
        return self._added(self.plan.tasks_of(stage))

    @property
    def bubble(self) -> float:
        """The idle share of the time, the mean over all stages, from 0 to 1.

        Includes the time of ``exposed_s``.
        """
        whole_s = self.total_s * self.plan.num_stages
        return 1.0 - self._added(self.plan.tasks()) / whole_s if whole_s else 0.0

    @property
    def exposed(self) -> float:
        """The share of the time in which only gradients are added up over replicas."""
        return self.exposed_s / self.total_s if self.total_s else 0.0

    @property
    def hidden(self) -> float:
        """The share of all stages' all-reduce that does not make the step longer, from 0 to 1."""
        computed_s = self.total_s - self.exposed_s
        all_s = math.fsum(one.end_s - one.start_s for one in self.all_reduces)
        late_s = (max(0.0, one.end_s - max(one.start_s, computed_s)) for one in self.all_reduces)
        return 1.0 - math.fsum(late_s) / all_s if all_s else 1.0

    def peak_bytes(self, stage: int) -> int:
        """Return the most bytes that a stage holds, as ``memory.py`` counts them."""
        return peak_bytes(self.plan, self.costs, self.routes, stage)

    def _added(self, tasks: Iterable[Task]) -> float:
        seconds = self.costs.seconds
        return math.fsum(seconds[kind][j] for kind, _, j in tasks)


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
    for name, count in (("costs", costs.num_partitions), ("routes", len(routes.placement))):
        if count != plan.num_partitions:
            what = "stages" if plan.num_partitions == plan.num_stages else "partitions"
            raise ValueError(f"the plan has {plan.num_partitions} {what}, but the {name} {count}")
    starts_s, free_s = _walk(plan, costs)
    total_s = max(free_s)
    if math.isinf(total_s):
        raise ValueError("a task uses what no task before it makes; verify() lists which")
    ends_s = free_s.copy()  # of each stage, with the gradients of tied parameters
    for stage in range(plan.num_stages):
        for other, (_, seconds) in costs.tied_into(stage, plan).items():
            ends_s[stage] = max(ends_s[stage], free_s[other] + seconds)
    computed_s = max(ends_s)
    all_reduces = tuple(_all_reduces(plan, costs, starts_s, ends_s)) if costs.buckets else ()
    total_s = max([computed_s, *(one.end_s for one in all_reduces)])
    exposed_s = total_s - computed_s
    return Timeline(plan, costs, routes, total_s, exposed_s, all_reduces, starts_s)


def _all_reduces(
    plan: Plan, costs: Costs, starts_s: Mapping[Task, float], ends_s: Sequence[float]
) -> Iterator[AllReduce]:
    """Yield when each stage adds up its buckets, given the end of everything else it does."""
    if len(costs.buckets) != plan.num_stages:
        raise ValueError(
            f"the plan has {plan.num_stages} stages, but the costs' buckets are of "
            f"{len(costs.buckets)}"
        )
    for stage, buckets in enumerate(costs.buckets) if plan.has_backward else ():
        last = last_additions(plan.tasks_of(stage))
        free_s = 0.0
        for num_bytes, seconds, final in buckets:
            ready_s = 0.0 if final else ends_s[stage]
            for j, share in final:
                if j not in last:
                    raise ValueError(
                        f"the costs have a bucket of stage {stage} with gradients of partition "
                        f"{j}, which is on another stage"
                    )
                part_s = share * costs.seconds[last[j].kind][j]
                ready_s = max(ready_s, starts_s[last[j]] + part_s)
            start_s = max(free_s, ready_s)
            free_s = start_s + seconds
            yield AllReduce(stage, num_bytes, start_s, free_s)


def _walk(plan: Plan, costs: Costs) -> tuple[dict[Task, float], list[float]]:
    """Return when each task starts, and when each stage has ended."""
    placement, p = plan.placement, plan.num_partitions
    hops_s = (0.0, *costs.hops_s(placement), 0.0)
    # By micro-batch and partition, when outputs are made and gradients of inputs; at infinity until
    # known. One place more at either end: what comes from elsewhere, at time 0.
    unknown = [0.0, *[math.inf] * p, 0.0]
    outputs_s = [unknown.copy() for _ in range(plan.num_micro_batches)]
    gradients_s = [unknown.copy() for _ in range(plan.num_micro_batches)]
    if not plan.has_forward:  # an earlier plan has run it
        outputs_s = [[0.0] * (p + 2)] * plan.num_micro_batches
    seconds = costs.seconds
    starts_s: dict[Task, float] = {}
    free_s = [0.0] * plan.num_stages
    for task in plan.tasks():
        kind, i, j = task
        if kind == FORWARD:
            arrival_s = outputs_s[i][j] + hops_s[j]
        elif kind == RECOMPUTE:
            arrival_s = outputs_s[i][j + 1]
        elif kind == WEIGHT_GRADIENT:
            arrival_s = gradients_s[i][j + 1]
        else:
            arrival_s = gradients_s[i][j + 2] + hops_s[j + 1]
        start_s = free_s[placement[j]]
        if arrival_s > start_s:
            start_s = arrival_s
        starts_s[task] = start_s
        end_s = free_s[placement[j]] = start_s + seconds[kind][j]
        if kind == FORWARD:
            outputs_s[i][j + 1] = end_s
        elif kind in (BACKWARD, INPUT_GRADIENT):
            gradients_s[i][j + 1] = end_s
    return starts_s, free_s
