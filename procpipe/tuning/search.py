"""Plans for a model whose costs are known, the fastest first.

The fixed schedules are among them, and the best of the plans that ``list_schedule.py`` makes by
several rules. So what comes first is never slower, as simulated, than the best fixed schedule. A
searched plan wins where the fixed ones take for granted what is not so: that stages are equal, that
F, I and W are, that transfers cost nothing, or that there is as much memory as they happen to need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from procpipe.errors import PlanError
from procpipe.plan.costs import Costs
from procpipe.plan.memory import peak_bytes
from procpipe.plan.placement import folded, looped
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.fuse import fused
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.schedules.zero_bubble import zb_h1, zb_v
from procpipe.plan.simulate import simulate
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.tuning.list_schedule import Rule, list_schedule, one_at_a_time

#: The name of the candidate that is no fixed schedule.
SEARCHED = "searched"

#: How many tasks the search may place before it ends: a second's work. By count and not by the
#: clock, so that the same costs give the same plan. The first rules are tried in any case.
_MOST_TASKS = 30_000

#: A plan must be faster by this share to be taken instead of one found before, which holds less.
_FASTER = 0.005

#: Sums of seconds in another order differ by less than this share.
_SAME = 1e-9


@dataclass(frozen=True)
class Candidate:
    """A plan, and what is to be expected of it.

    Attributes:
        name: the schedule's name; ``SEARCHED`` for one that the search has made.
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
    """Make plans of a whole mini-batch, the fastest first, and of the equally fast the smallest.

    Args:
        m: the number of micro-batches.
        costs: what its tasks and transfers cost.
        routes: where its tensors go, and on which stages the partitions are.
        recompute: the micro-batches to recompute.
        limits_bytes: the most that each stage may hold; plans that hold more are left out, so
            there may be none; ``least_bytes`` tells then what would do.
    """
    plans = list(fixed_plans(m, routes, recompute))
    if plan := searched(m, costs, routes, recompute=recompute, limits_bytes=limits_bytes):
        plans.append((SEARCHED, plan))
    found = []
    for name, plan in plans:
        peaks = _peaks(plan, costs, routes)
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
    """Make plans by several rules, and return the fastest that runs to its end.

    Of plans about as fast, the one with fewer micro-batches under way. Takes about a second for a
    thousand and a half tasks (32 micro-batches, 8 stages of 2 partitions, backward in two). For
    the arguments see ``candidates``.

    Returns:
        The plan; None if there is none within the limits.
    """
    best: Plan | None = None
    best_s = num_tasks = 0.0
    if limits_bytes is not None:
        plans = [
            one_at_a_time(m, routes, recompute=recompute, in_two=in_two) for in_two in (False, True)
        ]
        plans += [plan for _, plan in plans_in_two(m, routes, recompute)]
        fitting = [plan for plan in plans if _fits(_peaks(plan, costs, routes), limits_bytes)]
        for plan in fitting:
            total_s = simulate(plan, costs, routes).total_s
            if best is None or total_s < best_s:
                best, best_s = plan, total_s
    shortest_s = _shortest_s(m, costs, routes, recompute)
    for is_first, share, rule in _rules(routes.num_stages, m):
        if limits_bytes is None and share < 1.0:
            continue
        room = None if limits_bytes is None else [int(share * limit) for limit in limits_bytes]
        if best is not None and best_s <= shortest_s * (1.0 + _SAME):
            break
        if num_tasks > _MOST_TASKS and not is_first:
            break
        made = list_schedule(m, costs, routes, recompute=recompute, limits_bytes=room, rule=rule)
        num_tasks += (2 + rule.in_two) * m * len(routes.placement)
        if made is None:
            continue
        if rule.in_two:
            joined = fused(made, costs)
            if limits_bytes is None or _fits(_peaks(joined, costs, routes), limits_bytes):
                made = joined
        total_s = simulate(made, costs, routes).total_s
        if (best is None or total_s < best_s * (1.0 - _FASTER)) and _runs(made, routes):
            best, best_s = made, total_s
    return best


def fixed_plans(
    m: int, routes: Routes, recompute: Collection[int] = ()
) -> Iterator[tuple[str, Plan]]:
    """Walk through the fixed schedules that are for this placement."""
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
    """Walk through the zero-bubble schedules for this placement, with every backward in two.

    What a fixed schedule joins holds a message more at times, as buffers are posted by task.
    """
    n = routes.num_stages
    for name, make, placement in (("zb-h1", zb_h1, looped(n, n)), ("zb-v", zb_v, folded(2 * n, n))):
        if routes.placement == placement:
            yield name, make(m, n, recompute=recompute)


def least_bytes(
    m: int, costs: Costs, routes: Routes, *, recompute: Collection[int] = ()
) -> tuple[int, ...]:
    """Tell what each stage must be allowed to hold for there surely to be a plan.

    In it, one micro-batch at a time goes forward and backward. For the arguments see
    ``candidates``.
    """
    plans = (
        one_at_a_time(m, routes, recompute=recompute, in_two=in_two) for in_two in (False, True)
    )
    return min((_peaks(plan, costs, routes) for plan in plans), key=sum)


def _peaks(plan: Plan, costs: Costs, routes: Routes) -> tuple[int, ...]:
    return tuple(peak_bytes(plan, costs, routes, stage) for stage in range(routes.num_stages))


def _shortest_s(m: int, costs: Costs, routes: Routes, recompute: Collection[int]) -> float:
    """Return what no plan can pass: a stage's work, once its first micro-batch has come."""
    placement, come_s = routes.placement, 0.0
    shortest_s = [0.0] * routes.num_stages
    work_s = [0.0] * routes.num_stages
    hops_s = (0.0, *costs.hops_s(placement))
    for j, stage in enumerate(placement):
        come_s += hops_s[j]
        if not work_s[stage]:
            shortest_s[stage] = come_s
        halves_s = costs.input_gradient_s[j] + costs.weight_gradient_s[j]
        again_s = len(recompute) * costs.recompute_s[j]
        backward_s = min(costs.backward_s[j], halves_s)
        work_s[stage] += m * (costs.forward_s[j] + backward_s) + again_s
        come_s += costs.forward_s[j]
    return max(start + work for start, work in zip(shortest_s, work_s, strict=True))


def _rules(n: int, m: int) -> Iterator[tuple[bool, float, Rule]]:
    """Walk through the rules to try, each with the share of the memory that it is given.

    Narrow windows come before wide ones: of two plans as fast, the first needs less memory. To use
    all memory there is can be slower than to leave some, as it lets forward tasks run ahead.

    Yields:
        Whether the rule is tried in any case, the share, and the rule.
    """
    windows = (-m, -1, 0, 1, 2, n, None)
    variants = ((1.0, 0.0, True), (0.85, 0.0, True), (1.0, 0.5, True), (1.0, 1.0, True))
    for share, patience, deep_first in (*variants, (1.0, 0.0, False)):
        is_first = (share, patience, deep_first) == variants[0]
        for window, in_two in product(windows, (False, True)):
            yield is_first, share, Rule(in_two, window, patience, deep_first)


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
