"""Runs cases on a pool of processes, and makes those that fail smaller."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from tests.dist.pool import Pool, Ranks
from tests.dist.report import RanksHungError
from tests.fuzz.case import Case, simpler
from tests.fuzz.compare import run_one

#: Errors of ranks that end because of another one.
VICTIMS = ("RemoteStageError", "PeerLostError")

#: How often a case that fails is run again to make it smaller, and for how long.
MAX_TRIES, MAX_S = 120, 60.0


def fault_of(pool: Pool, case: Case) -> str | None:
    """Run a case; return what was wrong, of each rank that failed first, or None."""
    drawn: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="procpipe-fuzz-") as folder:
        for r, run in enumerate(case.runs):
            ranks = Ranks(pool, run.num_ranks)
            try:
                outcomes = ranks.run(run_one, case, r, folder, drawn, world=False)
            except RanksHungError as error:
                return f"rank ?: RanksHungError: {error}"
            if errors := {outcome.rank: outcome.error for outcome in outcomes if outcome.error}:
                causes = {k: each for k, each in errors.items() if each.type not in VICTIMS}
                causes = causes or errors
                lines = [f"rank {rank}: {each.type}: {each.text}" for rank, each in causes.items()]
                return "\n".join([*lines, *(each.traceback for each in causes.values())])
            drawn = outcomes.values()
    return None


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case that still fails, found in a limited number of tries and time."""
    end_s = time.monotonic() + MAX_S
    num_tries, smaller = 0, simpler(case)
    while (tried := next(smaller, None)) is not None:
        if num_tries == MAX_TRIES or time.monotonic() > end_s:
            break
        num_tries += 1
        if fails(tried):
            case, smaller = tried, simpler(tried)
    return case


def explain(pool: Pool, seed: int, number: int, case: Case, fault: str) -> str:
    """Return what is wrong with a case made smaller, and how to repeat both."""
    small = smallest(case, lambda tried: _kind(fault_of(pool, tried)) == _kind(fault))
    if small != case:
        fault = fault_of(pool, small) or f"{fault}\n(the smaller case does not always fail)"
    return (
        f"case {number} of seed {seed} fails\n{fault}\n"
        f"repeat it with: python -m tests.fuzz --seed {seed} --case {number}\n"
        f'made smaller:   python -m tests.fuzz --this "{small}"\n'
    )


def _kind(fault: str | None) -> str | None:
    """Return what failures of one kind have in common: the exception and what was compared."""
    return None if fault is None else ":".join(fault.splitlines()[0].split(":")[1:3]).split("[")[0]
