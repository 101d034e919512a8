"""Finds plans for known costs, the fastest first.

The candidates are the fixed schedules and the best plan that ``list_schedule.py`` makes by several
rules. So the first one is, as simulated, never slower than the best fixed schedule. A searched plan
is faster where stages differ, where F, I and W differ, where transfers take time, or where a fixed
schedule needs too much memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from procpipe.errors import PlanError
from procpipe.plan.costs import Costs
from procpipe.plan.memory import all_peak_bytes
from procpipe.plan.placement import folded, looped
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.fuse import fused
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.schedules.zero_bubble import zb_h1, zb_v
from procpipe.plan.simulate import simulate
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.tuning.list_schedule import ListRule, list_schedule
from procpipe.tuning.one_at_a_time import one_at_a_time
from procpipe.tuning.room import Effects

#: The name of a plan that was searched.
SEARCHED = "searched"

#: The search ends after placing so many tasks, about a second's work. Not by the clock, so that
#: equal costs give equal plans. The first rules are always tried.
_MOST_TASKS = 30_000

#: A plan must be faster by this share than an earlier one, which holds less.
_FASTER = 0.005

#: Seconds that differ by less than this share are equal.
_SAME = 1e-9


@dataclass(frozen=True)
class Candidate:
    """A plan, its name (``SEARCHED`` or a schedule's), and its predicted time and memory."""

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
    """Make plans of a whole mini-batch, the fastest first, then those with the least memory.

    Args:
        m: the number of micro-batches.
        costs: what its tasks and transfers cost.
        routes: where its tensors go, and the placement.
        recompute: the micro-batches to recompute.
        limits_bytes: the most that each stage may hold. There may be no plan within the limits;
            ``least_bytes`` then returns sufficient ones.
    """
    plans = list(fixed_plans(m, routes, recompute))
    if plan := searched(m, costs, routes, recompute=recompute, limits_bytes=limits_bytes):
        plans.append((SEARCHED, plan))
    found = []
    for name, plan in plans:
        peaks = all_peak_bytes(plan, costs, routes)
        if _fits(peaks, limits_bytes):
            found.append(Candidate(name, plan, simulate(plan, costs, routes).total_s, peaks))
    return sorted(found, key=lambda candidate: (candidate.total_s, sum(candidate.peak_bytes)))


def searched(
    m: int,
    costs: Costs,
    routes: Routes,
    *,
    recompute: Collection[int] = (),
    limits_bytes: Sequence[int] | None = None,
) -> Plan | None:
    """Make plans by several rules, and return the fastest one that verifies.

    Of plans about as fast, returns the one with narrower windows. Takes about a second for 1,500
    tasks (32 micro-batches, 8 stages of 2 partitions, split backward). For the arguments see
    ``candidates``.

    Returns:
        The plan; None if there is none within the limits.
    """
    best, best_s = _fastest_known(m, costs, routes, recompute, limits_bytes)
    shortest_s = _shortest_s(m, costs, routes, recompute)
    effects: dict[bool, Effects] = {}  # by whether backward is split
    num_tasks = 0
    for is_first, share, rule in _rules(routes.num_stages, m):
        if limits_bytes is None and share < 1.0:
            continue
        if best_s <= shortest_s * (1.0 + _SAME) or (num_tasks > _MOST_TASKS and not is_first):
            break
        limits = None
        if limits_bytes is not None:
            limits = [int(share * limit) for limit in limits_bytes]
            if rule.in_two not in effects:
                effects[rule.in_two] = Effects(costs, routes, in_two=rule.in_two)
        made = list_schedule(
            m,
            costs,
            routes,
            recompute=recompute,
            limits_bytes=limits,
            rule=rule,
            effects=effects.get(rule.in_two),
        )
        num_tasks += (2 + rule.in_two) * m * len(routes.placement)
        if made is None:
            continue
        if rule.in_two:
            joined = fused(made, costs)
            if limits_bytes is None or _fits(all_peak_bytes(joined, costs, routes), limits_bytes):
                made = joined
        total_s = simulate(made, costs, routes).total_s
        if total_s < best_s * (1.0 - _FASTER) and _runs(made, routes):
            best, best_s = made, total_s
    return best


def _fastest_known(
    m: int,
    costs: Costs,
    routes: Routes,
    recompute: Collection[int],
    limits_bytes: Sequence[int] | None,
) -> tuple[Plan | None, float]:
    """Return the fastest plan within limits that needs no search, and its seconds."""
    if limits_bytes is None:
        return None, math.inf
    plans = [one_at_a_time(m, routes, recompute=recompute, in_two=split) for split in (False, True)]
    plans += [plan for _, plan in plans_in_two(m, routes, recompute)]
    fitting = [plan for plan in plans if _fits(all_peak_bytes(plan, costs, routes), limits_bytes)]
    timed = [(plan, simulate(plan, costs, routes).total_s) for plan in fitting]
    return min(timed, key=lambda one: one[1], default=(None, math.inf))


def fixed_plans(
    m: int, routes: Routes, recompute: Collection[int] = ()
) -> Iterator[tuple[str, Plan]]:
    """Yield the fixed schedules that support the placement, by name."""
    placement, n = routes.placement, routes.num_stages
    v, rest = divmod(len(placement), n)
    for schedule in SCHEDULES.values():
        if rest or schedule.partitions_per_stage not in (None, v):
            continue
        if schedule.place(len(placement), n) == placement:
            yield schedule.name, schedule.plan(m, placement, recompute)


def plans_in_two(
    m: int, routes: Routes, recompute: Collection[int] = ()
) -> Iterator[tuple[str, Plan]]:
    """Yield the zero-bubble schedules for the placement, with every backward split.

    Where a fixed schedule fuses I and W, it may hold one more message, as buffers are posted by
    task.
    """
    n = routes.num_stages
    for name, make, placement in (("zb-h1", zb_h1, looped(n, n)), ("zb-v", zb_v, folded(2 * n, n))):
        if routes.placement == placement:
            yield name, make(m, n, recompute=recompute)


def least_bytes(
    m: int, costs: Costs, routes: Routes, *, recompute: Collection[int] = ()
) -> tuple[int, ...]:
    """Return limits for each stage within which there is a plan: one micro-batch at a time.

    For the arguments see ``candidates``.
    """
    plans = [one_at_a_time(m, routes, recompute=recompute, in_two=split) for split in (False, True)]
    return min((all_peak_bytes(plan, costs, routes) for plan in plans), key=sum)


def _shortest_s(m: int, costs: Costs, routes: Routes, recompute: Collection[int]) -> float:
    """Return a lower bound: the arrival of a stage's first micro-batch, and its work after that.

    And the work of a partition that has a tied parameter, with the transfer that follows.
    """
    placement, come_s = routes.placement, 0.0
    shortest_s = [0.0] * routes.num_stages
    work_s = [0.0] * routes.num_stages
    of_partition_s: list[float] = []
    hops_s = (0.0, *costs.hops_s(placement))
    for j, stage in enumerate(placement):
        come_s += hops_s[j]
        if not work_s[stage]:
            shortest_s[stage] = come_s
        halves_s = costs.input_gradient_s[j] + costs.weight_gradient_s[j]
        again_s = len(recompute) * costs.recompute_s[j]
        backward_s = min(costs.backward_s[j], halves_s)
        of_partition_s.append(m * (costs.forward_s[j] + backward_s) + again_s)
        work_s[stage] += of_partition_s[j]
        of_partition_s[j] += come_s
        come_s += costs.forward_s[j]
    ends_s = [start + work for start, work in zip(shortest_s, work_s, strict=True)]
    for stage, others in routes.tied_with.items():
        for other, shared in others.items():
            _, tied_s = costs.tied_between((stage, other), placement)
            ends_s.append(max(of_partition_s[j] for j in shared) + tied_s)
    return max(ends_s)


def _rules(n: int, m: int) -> Iterator[tuple[bool, float, ListRule]]:
    """Yield the rules to try: whether always to try it, the share of the limits, and the rule.

    Narrow windows come first, as they need less memory. A share below 1 can be faster, as forward
    tasks do not run as far ahead.
    """
    windows = (-m, -1, 0, 1, 2, n, None)
    variants = ((1.0, 0.0, True), (0.85, 0.0, True), (1.0, 0.5, True), (1.0, 1.0, True))
    for share, patience, deep_first in (*variants, (1.0, 0.0, False)):
        is_first = (share, patience, deep_first) == variants[0]
        for window, in_two in product(windows, (False, True)):
            yield is_first, share, ListRule(in_two, window, patience, deep_first)


def _runs(plan: Plan, routes: Routes) -> bool:
    try:
        verify(plan, routes)
    except PlanError:
        return False
    return True


def _fits(peaks: Sequence[int], limits_bytes: Sequence[int] | None) -> bool:
    if limits_bytes is None:
        return True
    return all(peak <= limit for peak, limit in zip(peaks, limits_bytes, strict=True))
