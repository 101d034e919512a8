"""``schedule="auto"``: what rank 0 decides from one training step to the next.

    steps      plan                                                   every rank reports afterwards
    0, 1       a first plan with B, one with I and W                  bytes      (and warm up)
    2 … 5      the same two in turns                                  seconds
               costs ── candidates ── at most three finalists
    6 … 14     the finalists in turns, each three times               the step's seconds
    15 …       the one with the least measured time                   nothing

The finalists are the first plan, the fastest as simulated and the fastest fixed schedule as
simulated; only a plan that is simulated to be ``MARGIN`` faster than the first is one. So what
stays has been measured to be no slower than the first plan, nor than the fixed schedule that is
best as simulated; a fixed schedule that the simulation misjudges is not tried. Another number of
micro-batches, later, is searched for with the same costs.

With replicas one choice is for all of them: of the one with the most micro-batches. Their reports
come together, and the slowest counts.

Under a limit of memory the first plans take one micro-batch at a time and recompute all: less is
not possible. Then those micro-batches that the user wants are recomputed, or all but the last, or
all, whichever is fastest: recomputing can cost less than waiting for free memory.

PURE: a state machine without sockets, clocks or torch. Only that of rank 0 is used; the others get
its plans with the orders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, NamedTuple

from procpipe.errors import MemoryLimitError
from procpipe.plan.costs import Costs
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.simulate import simulate
from procpipe.plan.task import RECOMPUTE, Plan
from procpipe.run.chooser import Choice
from procpipe.tuning.list_schedule import ListRule, list_schedule
from procpipe.tuning.one_at_a_time import one_at_a_time
from procpipe.tuning.search import (
    SEARCHED,
    Candidate,
    candidates,
    fixed_plans,
    least_bytes,
    plans_in_two,
)
from procpipe.tuning.step_costs import Report, costs_of

#: What ranks measure in a step, and report afterwards.
NOTHING, BYTES, SECONDS, WHOLE = "", "bytes", "seconds", "whole"

#: How much faster than the first plan another must be, as simulated, to be tried.
MARGIN = 0.02

#: The steps that are measured: whether backward is in two, and what is reported afterwards.
_MEASURED = ((False, BYTES), (True, BYTES), *((False, SECONDS), (True, SECONDS)) * 2)

#: How often each finalist runs.
_NUM_ROUNDS = 3

#: The name of the first plan under a limit.
_ONE_AT_A_TIME = "one at a time"


class _Case(NamedTuple):
    """The settings that a plan is for."""

    m: int
    input_bytes: int
    recompute: frozenset[int]
    routes: Routes


@dataclass
class _Contest:
    """The finalists, in turns."""

    case: _Case
    finalists: Sequence[Candidate]
    taken_s: list[float]

    @property
    def next(self) -> Candidate:
        return self.finalists[len(self.taken_s) % len(self.finalists)]

    @property
    def winner(self) -> Candidate | None:
        """The one with the least median of seconds; None until each had its turns."""
        num = len(self.finalists)
        if num > 1 and len(self.taken_s) < _NUM_ROUNDS * num:
            return None
        medians_s = [median(self.taken_s[place::num] or [0.0]) for place in range(num)]
        return self.finalists[medians_s.index(min(medians_s))]


class AutoSchedule:
    """Measures, searches, tries and chooses.

    Args:
        limits_bytes: the most that each stage may hold for backward passes; None for no limit.

    Attributes:
        costs: what was measured; None so far.
    """

    def __init__(self, limits_bytes: Sequence[int] | None = None) -> None:
        self.costs: Costs | None = None
        self._limits_bytes = limits_bytes
        self._input_bytes = 0  # of the largest micro-batch that was measured
        self._reports: dict[str, list[Sequence[Report]]] = {BYTES: [], SECONDS: []}
        self._found: dict[_Case, Sequence[Candidate]] = {}
        self._contest: _Contest | None = None
        self._asked: tuple[_Case, str] | None = None

    def choose(
        self, m: int, input_bytes: int, recompute: Collection[int], routes: Routes
    ) -> Choice:
        """Choose the plan of the next training step.

        Args:
            m: the number of micro-batches.
            input_bytes: the model's input of the largest micro-batch. If it is larger than any
                measured one, all other sizes are assumed to grow by the same factor.
            recompute: the micro-batches that the user wants recomputed.
            routes: where tensors go in this step.

        Raises:
            MemoryLimitError: no plan keeps the limits.
        """
        if self._limits_bytes is None:  # then one plan does for all sizes
            input_bytes = 0
        elif self.costs is not None:
            input_bytes = max(input_bytes, self._input_bytes)
        case = _Case(m, input_bytes, frozenset(recompute), routes)
        choice = self._choose(case)
        self._asked = case, choice.measure
        return choice

    def add_reports(self, reports: Sequence[Report]) -> None:
        """Take what all ranks measured in the step that has just ended.

        Args:
            reports: by rank, of all replicas.

        Raises:
            MemoryLimitError: all is measured now, and no plan keeps the limits.
        """
        assert self._asked is not None, "reports follow a step"
        case, measured = self._asked
        if measured == WHOLE:
            assert self._contest is not None, "only finalists are timed as a whole"
            self._contest.taken_s.append(max(report.step_s for report in reports))
            return
        self._input_bytes = max(self._input_bytes, case.input_bytes)
        self._reports[measured].append(reports)
        if self._num_measured == len(_MEASURED):
            self.costs = costs_of(self._reports[BYTES], self._reports[SECONDS], case.routes)
            self._contest = _Contest(case, self._finalists(case), [])

    def like(self, choice: Choice, m: int, recompute: Collection[int], routes: Routes) -> Plan:
        """Return the plan of a replica whose micro-batches are others, like one just chosen.

        Of the same name, if there is one for so many.
        """
        assert self._asked is not None, "a choice comes first"
        case = _Case(m, self._asked[0].input_bytes, frozenset(recompute), routes)
        if self.costs is None:
            in_two, _ = _MEASURED[self._num_measured]
            return self._first(case, in_two=in_two)[1]
        found = self._searched(case)
        same = [candidate for candidate in found if candidate.name == choice.name]
        return (*same, *found)[0].plan

    @property
    def _num_measured(self) -> int:
        return sum(map(len, self._reports.values()))

    def _choose(self, case: _Case) -> Choice:
        if case.routes.num_stages == 1 and self._limits_bytes is None:
            name, plan = self._first(case, in_two=False)
            return Choice(plan, name)
        if self.costs is None:
            in_two, measure = _MEASURED[self._num_measured]
            name, plan = self._first(case, in_two=in_two)
            step = f"measuring, step {self._num_measured + 1} of {len(_MEASURED)}, {name}"
            return Choice(plan, step, measure)
        contest = self._contest
        assert contest is not None, "a search follows as soon as there are costs"
        best = contest.winner
        if contest.case == case:
            if best is None:
                tried = contest.next
                return Choice(tried.plan, f"trying {_described(tried, case)}", WHOLE, tried.name)
            return Choice(best.plan, _described(best, case), name=best.name)
        found = self._searched(case)
        same = [candidate for candidate in found if best and candidate.name == best.name]
        chosen = (*same, *found)[0]
        return Choice(chosen.plan, _described(chosen, case), name=chosen.name)

    def _first(self, case: _Case, *, in_two: bool) -> tuple[str, Plan]:
        """Make a plan to measure with."""
        m, routes = case.m, case.routes
        if self._limits_bytes is not None:
            return _ONE_AT_A_TIME, one_at_a_time(m, routes, recompute=range(m), in_two=in_two)
        plans = plans_in_two if in_two else fixed_plans
        found = dict(plans(m, routes, case.recompute))
        for name in ("zb-h1", "zb-v") if in_two else ("1f1b", "interleaved"):
            if name in found:
                return name, found[name]
        equal = Costs.uniform(len(routes.placement))
        plan = list_schedule(m, equal, routes, recompute=case.recompute, rule=ListRule(in_two))
        assert plan is not None, "without limits there always is a plan"
        return SEARCHED, plan

    def _finalists(self, case: _Case) -> list[Candidate]:
        """Choose what to try, beginning with the first plan."""
        assert self.costs is not None, "searched with what was measured"
        found = self._searched(case)
        name, plan = self._first(case, in_two=False)
        costs = self._costs_for(case)
        timeline = simulate(plan, costs, case.routes)
        peaks = tuple(map(timeline.peak_bytes, range(case.routes.num_stages)))
        finalists = [Candidate(name, plan, timeline.total_s, peaks)]
        fixed = [candidate for candidate in found if candidate.name != SEARCHED]
        for candidate in (*found[:1], *fixed[:1]):
            is_faster = candidate.total_s < (1.0 - MARGIN) * timeline.total_s
            if is_faster and candidate.plan not in [finalist.plan for finalist in finalists]:
                finalists.append(candidate)
        return finalists

    def _searched(self, case: _Case) -> Sequence[Candidate]:
        if case not in self._found:
            self._found[case] = self._search(case)
        return self._found[case]

    def _search(self, case: _Case) -> Sequence[Candidate]:
        costs, limits = self._costs_for(case), self._limits_bytes
        m, _, wanted, routes = case
        if limits is None:
            return candidates(m, costs, routes, recompute=wanted)
        modes = ("never", "except_last", "always")
        found = [
            candidate
            for again in dict.fromkeys(wanted | recomputed(mode, m) for mode in modes)
            for candidate in candidates(m, costs, routes, recompute=again, limits_bytes=limits)
        ]
        if found:
            return sorted(found, key=lambda candidate: candidate.total_s)
        least = least_bytes(m, costs, routes, recompute=range(m))
        needs = enumerate(zip(least, limits, strict=True))
        raise MemoryLimitError([(j, need, limit) for j, (need, limit) in needs if need > limit])

    def _costs_for(self, case: _Case) -> Costs:
        """Return the costs, with more bytes for larger micro-batches than were measured."""
        assert self.costs is not None, "searched with what was measured"
        if case.input_bytes <= self._input_bytes:
            return self.costs
        return _grown(self.costs, case.input_bytes / self._input_bytes)


def _described(candidate: Candidate, case: _Case) -> str:
    """Name a candidate, with a remark if it recomputes more than the user asked for."""
    again = {task.i for task in candidate.plan.tasks_of(0) if task.kind == RECOMPUTE}
    if again == case.recompute:
        return candidate.name
    return f"{candidate.name}, {len(again)} of {case.m} micro-batches recomputed"


def _grown(costs: Costs, factor: float) -> Costs:
    """Return the costs with more bytes of all that depends on the samples."""

    def grown(size: Any) -> Any:
        if isinstance(size, Mapping):
            return {key: grown(one) for key, one in size.items()}
        return tuple(map(grown, size)) if isinstance(size, tuple) else round(size * factor)

    names = [f.name for f in fields(costs) if f.name.endswith("_bytes") and f.name != "tied_bytes"]
    return replace(costs, **{name: grown(getattr(costs, name)) for name in names})
