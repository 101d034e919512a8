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
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from procpipe.plan.all_reduce import AllReduce, last_additions
from procpipe.plan.costs import Costs
from procpipe.plan.memory import peak_bytes
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


class _Track:
    """Start and end of every task of one kind, at infinity until they are known.

    Row ``i`` has a place for each partition and one more at either end, where inputs of the first
    and the last partition come from, at time 0: ``0.0 [0] [1] … [p-1] 0.0``.
    """

    def __init__(self, m: int, p: int, ends_s: array[float] | None = None) -> None:
        row = array("d", [0.0, *([math.inf] * p), 0.0])
        self.starts_s = row * m
        self.ends_s = row * m if ends_s is None else ends_s


class _Rule(NamedTuple):
    """How the times of one kind of task are computed; sequences are by partition."""

    track: _Track
    seconds: Sequence[float]
    makers_s: array[float]  # the ends of the tasks that make the inputs
    away: int  # how many partitions away those are
    hop_s: Sequence[float]


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each task of a plan starts and ends, from 0 to ``total_s``."""

    plan: Plan
    costs: Costs
    routes: Routes
    total_s: float  # seconds of the step
    exposed_s: float  # the part of it in which only gradients are added up over replicas
    all_reduces: tuple[AllReduce, ...]  # when each stage does that, by stage and in order
    _tracks: Mapping[str, _Track] = field(repr=False)
    _busy_s: tuple[float, ...] = field(repr=False)

    def start_s(self, task: Task) -> float:
        """Return when a task starts.

        Raises:
            KeyError: the plan does not have the task.
        """
        place = self._place(task)
        return self._tracks[task.kind].starts_s[place]

    def end_s(self, task: Task) -> float:
        """Return when a task ends.

        Raises:
            KeyError: the plan does not have the task.
        """
        place = self._place(task)
        return self._tracks[task.kind].ends_s[place]

    def busy_s(self, stage: int) -> float:
        """Return how long a stage computes."""
        return self._busy_s[stage]

    @property
    def bubble(self) -> float:
        """The idle share of the time, the mean over all stages, from 0 to 1.

        Includes the time of ``exposed_s``.
        """
        whole_s = self.total_s * self.plan.num_stages
        return 1.0 - math.fsum(self._busy_s) / whole_s if whole_s else 0.0

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

    def _place(self, task: Task) -> int:
        m, p = self.plan.num_micro_batches, self.plan.num_partitions
        place = _place_of(task, self.plan)
        there = task.kind in self._tracks and 0 <= task.i < m and 0 <= task.j < p
        if not there or math.isinf(self._tracks[task.kind].starts_s[place]):
            raise KeyError(f"{task} is not in the plan")
        return place


def _place_of(task: Task, plan: Plan) -> int:
    """Return a task's place in a track."""
    return task.i * (plan.num_partitions + 2) + task.j + 1


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
    tracks, free_s, busy_s = _walk(plan, costs)
    total_s = max(free_s)
    if math.isinf(total_s):
        raise ValueError("a task uses what no task before it makes; verify() lists which")
    ends_s = free_s.copy()  # of each stage, with the gradients of tied parameters
    for stage in range(plan.num_stages):
        for _, task, transfer in routes.tied_gradients(plan, stage):
            to = routes.stages_of(transfer)
            made_s = tracks[task.kind].ends_s[_place_of(task, plan)]
            ends_s[to[1]] = max(ends_s[to[1]], made_s + costs.tied_between(to, plan.placement)[1])
    computed_s = max(ends_s)
    all_reduces = tuple(_all_reduces(plan, costs, tracks, ends_s)) if costs.buckets else ()
    total_s = max([computed_s, *(one.end_s for one in all_reduces)])
    exposed_s = total_s - computed_s
    return Timeline(plan, costs, routes, total_s, exposed_s, all_reduces, tracks, tuple(busy_s))


def _all_reduces(
    plan: Plan, costs: Costs, tracks: Mapping[str, _Track], ends_s: Sequence[float]
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
                    raise ValueError(f"stage {stage} adds up gradients of partition {j}, of others")
                place = _place_of(last[j], plan)
                track = tracks[last[j].kind]
                start_s, end_s = track.starts_s[place], track.ends_s[place]
                ready_s = max(ready_s, start_s + share * (end_s - start_s))
            start_s = max(free_s, ready_s)
            free_s = start_s + seconds
            yield AllReduce(stage, num_bytes, start_s, free_s)


def _walk(plan: Plan, costs: Costs) -> tuple[Mapping[str, _Track], list[float], list[float]]:
    """Return the tracks, when each stage has ended, and how long each has computed."""
    m, p, placement = plan.num_micro_batches, plan.num_partitions, plan.placement
    forward, backward, recompute = _Track(m, p), _Track(m, p), _Track(m, p)
    first_half = _Track(m, p, ends_s=backward.ends_s)  # of a backward; either makes the gradient
    second_half = _Track(m, p)
    if not plan.has_forward:  # an earlier plan has run it
        forward.ends_s = array("d", [0.0]) * len(forward.ends_s)
    hops_s = costs.hops_s(placement)
    down_s, up_s, none_s = (0.0, *hops_s), (*hops_s, 0.0), (0.0,) * p
    gradients_s = backward.ends_s
    rules = {
        FORWARD: _Rule(forward, costs.forward_s, forward.ends_s, -1, down_s),
        BACKWARD: _Rule(backward, costs.backward_s, gradients_s, +1, up_s),
        RECOMPUTE: _Rule(recompute, costs.recompute_s, forward.ends_s, 0, none_s),
        INPUT_GRADIENT: _Rule(first_half, costs.input_gradient_s, gradients_s, +1, up_s),
        WEIGHT_GRADIENT: _Rule(second_half, costs.weight_gradient_s, gradients_s, 0, none_s),
    }
    free_s, busy_s = [0.0] * plan.num_stages, [0.0] * plan.num_stages
    for cycle in plan.cycles:
        for kind, i, j in cycle:
            track, seconds, makers_s, away, hop_s = rules[kind]
            place, stage = i * (p + 2) + j + 1, placement[j]
            start_s = free_s[stage]
            arrival_s = makers_s[place + away] + hop_s[j]
            if arrival_s > start_s:
                start_s = arrival_s
            track.starts_s[place] = start_s
            track.ends_s[place] = free_s[stage] = start_s + seconds[j]
            busy_s[stage] += seconds[j]
    return {kind: rule.track for kind, rule in rules.items()}, free_s, busy_s
