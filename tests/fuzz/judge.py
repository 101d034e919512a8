"""Runs cases on a pool of processes, makes those that fail smaller, and writes them as scripts."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tests.dist.pool import Pool, Ranks
from tests.dist.report import Outcomes, RanksHungError
from tests.fuzz.case import Case, simpler
from tests.fuzz.compare import run_cases

#: The most cases in one run of a pool.
AT_ONCE = 20

#: What a run of several cases may take; each takes a fraction of a second.
TIMEOUT_S = 100.0
WORLD_TIMEOUT_S = 20.0

#: How often a case that fails is run again to make it smaller, and for how long.
MAX_TRIES, MAX_S = 80, 60.0

ROOT = Path(__file__).parents[2]

SCRIPT = '''\
"""{title}"""

import sys

sys.path.insert(0, {root!r})

from tests.fuzz.case import Case, Run
from tests.fuzz.judge import repeat

sys.exit(repeat({case}))
'''


def judge(pool: Pool, cases: list[Case]) -> list[str | None]:
    """Run cases with the same number of ranks; return the fault of each, or None.

    The cases of a run that hangs, or in which a process dies, are run again one by one.
    """
    ranks = Ranks(pool, cases[0].num_ranks)
    folder = tempfile.mkdtemp(prefix="procpipe-fuzz-")
    try:
        outcomes = ranks.run(
            run_cases,
            cases,
            folder,
            world=False,
            timeout_s=TIMEOUT_S,
            world_timeout_s=WORLD_TIMEOUT_S,
        )
        if all(outcome.error is None for outcome in outcomes):
            of_ranks = outcomes.values()
            return [_joined(of_case) for of_case in zip(*of_ranks, strict=True)]
        fault = _death(outcomes)
    except RanksHungError as error:
        fault = f"rank ?: RanksHungError: {error}"
    finally:
        shutil.rmtree(folder)
    return [fault] if len(cases) == 1 else [judge(pool, [case])[0] for case in cases]


def together(cases: Mapping[int, Case]) -> Iterator[list[int]]:
    """Yield the numbers of cases that run together: a few with the same number of ranks."""
    waiting: dict[int, list[int]] = {}
    for number, case in cases.items():
        of_ranks = waiting.setdefault(case.num_ranks, [])
        of_ranks.append(number)
        if len(of_ranks) == AT_ONCE:
            yield waiting.pop(case.num_ranks)
    yield from waiting.values()


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case that still fails, found in a limited number of tries and time."""
    end_s = time.monotonic() + MAX_S
    num_tries, smaller = 0, simpler(case)
    while (tried := next(smaller, None)) is not None:
        if num_tries == MAX_TRIES or time.monotonic() > end_s:
            break
        if tried != case:
            num_tries += 1
            if fails(tried):
                case, smaller = tried, simpler(tried)
    return case


def explain(pool: Pool, seed: int, number: int, case: Case, fault: str) -> str:
    """Return a failed case made smaller, as a script, with its fault and how to repeat it."""
    small = smallest(case, lambda tried: _kind(judge(pool, [tried])[0]) == _kind(fault))
    if small != case:
        fault = judge(pool, [small])[0] or f"{fault}\n(the smaller case does not always fail)"
    title = f"Case {number} of seed {seed}{'' if small == case else ', made smaller'}."
    return (
        f"case {number} of seed {seed} fails\n{fault}\n"
        f"repeat it with: python -m tests.fuzz --seed {seed} --case {number}\n"
        f"or save this as case.py, and run it with: {ROOT}/.venv/bin/python case.py\n\n"
        f"{script_of(small, title)}"
    )


def script_of(case: Case, title: str) -> str:
    """Write a Python program that runs one case, and says what differs."""
    return SCRIPT.format(title=title, root=str(ROOT), case=case)


def repeat(case: Case) -> int:
    """Run one case on processes of its own, print what differs, and return an exit code."""
    pool = Pool()
    try:
        (fault,) = judge(pool, [case])
    finally:
        pool.close()
    print("no difference" if fault is None else fault)
    return int(fault is not None)


def _joined(of_ranks: Iterable[str | None]) -> str | None:
    faults = list(of_ranks)
    lines = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
    if not lines and any(fault is not None for fault in faults):
        return "rank ?: RemoteStageError: every rank ended because of another"
    return "\n".join(lines) or None


def _kind(fault: str | None) -> str | None:
    """Return what failures of one kind have in common: the exception and what was compared."""
    return None if fault is None else ":".join(fault.splitlines()[0].split(":")[1:3]).split("[")[0]


def _death(outcomes: Outcomes) -> str:
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    return "\n".join(f"rank {outcome.rank}: {outcome}" for outcome in failed)
