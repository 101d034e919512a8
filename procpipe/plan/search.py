"""Plans for a model whose costs are known, the fastest first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from procpipe.plan.costs import Costs
from procpipe.plan.routes import Routes
from procpipe.plan.schedules import SCHEDULES
from procpipe.plan.simulate import simulate
from procpipe.plan.task import Plan

__all__ = ["Candidate", "candidates"]


@dataclass(frozen=True)
class Candidate:
    """A plan, and what is to be expected of it.

    Attributes:
        name: the schedule's name.
        plan: the plan.
        total_s: simulated seconds of a mini-batch.
        peak_bytes: the most that each stage holds.
    """

    name: str
    plan: Plan
    total_s: float
    peak_bytes: tuple[int, ...]


def candidates(
    m: int,
    costs: Costs,
    routes: Routes,
    *,
    recompute: Collection[int] = (),
    limits_bytes: Sequence[int] | None = None,
) -> list[Candidate]:
    """Make plans of a whole mini-batch, the fastest first.

    Args:
        m: the number of micro-batches.
        costs: what its tasks and transfers cost.
        routes: where its tensors go, and on which stages the partitions are.
        recompute: the micro-batches to recompute.
        limits_bytes: the most that each stage may hold; plans that hold more are left out, so
            there may be none.
    """
    found = []
    for schedule in SCHEDULES.values():
        v, rest = divmod(len(routes.placement), routes.num_stages)
        if rest or schedule.num_parts not in (None, v):
            continue
        if schedule.place(len(routes.placement), routes.num_stages) != routes.placement:
            continue
        plan = schedule.plan(m, routes.placement, recompute)
        timeline = simulate(plan, costs, routes)
        peaks = tuple(map(timeline.peak_bytes, range(routes.num_stages)))
        if limits_bytes is None or all(
            p <= most for p, most in zip(peaks, limits_bytes, strict=True)
        ):
            found.append(Candidate(schedule.name, plan, timeline.total_s, peaks))
    return sorted(found, key=lambda candidate: candidate.total_s)
