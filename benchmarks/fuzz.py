"""Random models, options and calls, beside the plain model: no case may differ.

    python -m benchmarks fuzz --seed 0 --cases 2000
    python -m benchmarks fuzz --seed 0 --case 17              # only this case
    python -m benchmarks fuzz --text '{"seed": …}'            # a case made smaller

A case is drawn from the seed and its number alone. A case that differs, fails or hangs is printed
with the command that repeats it, and made smaller for as long as it still fails.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from benchmarks.fuzz_cases import SCHEDULES, Case, draw, simpler
from benchmarks.fuzz_run import run_cases
from benchmarks.report import Cell, Report, Table
from tests.dist.pool import Pool, Ranks
from tests.dist.report import Outcomes, RanksHungError

#: Cases in one run of a pool, and runs after which the pool gets new processes.
_AT_ONCE = 20
_RUNS_A_POOL = 10

#: What a run of several cases may take; each takes a fraction of a second.
_TIMEOUT_S = 100.0
_WORLD_TIMEOUT_S = 20.0

#: How often a case that fails is run again to make it smaller.
_MAX_TRIES = 60


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--case", type=int, help="run only the case of this number")
    parser.add_argument("--text", help="run only this case, as printed with a failure")
    parser.add_argument("--stop", action="store_true", help="stop at the first that fails")


def run(options: argparse.Namespace) -> Report:
    cases = dict(_selected(options))
    failed: list[int] = []
    num_run = 0
    start_s = time.monotonic()
    pool = Pool()
    try:
        for k, numbers in enumerate(_together(cases)):
            if k % _RUNS_A_POOL == _RUNS_A_POOL - 1:
                pool.close()
                pool = Pool()
            stories = judge(pool, [cases[number] for number in numbers])
            num_run += len(numbers)
            for number, story in zip(numbers, stories, strict=True):
                if story is not None:
                    failed.append(number)
                    _report(pool, options, number, cases[number], story)
            if failed and options.stop:
                break
    finally:
        pool.close()
    if failed:
        raise RuntimeError(f"{len(failed)} of {num_run} cases failed: {sorted(failed)}")
    return Report(
        "fuzz",
        [_tabulate(cases.values(), time.monotonic() - start_s)],
        {"failed": len(failed)},
        {"seed": options.seed, "first": options.first, "cases": len(cases)},
    )


def judge(pool: Pool, cases: list[Case]) -> list[str | None]:
    """Run cases with the same number of ranks; return the fault of each, or None.

    The cases of a run that hangs, or in which a process dies, are run again one by one.
    """
    ranks = Ranks(pool, cases[0].num_ranks)
    try:
        outcomes = ranks.run(
            run_cases, cases, world=False, timeout_s=_TIMEOUT_S, world_timeout_s=_WORLD_TIMEOUT_S
        )
        if all(outcome.error is None for outcome in outcomes):
            of_ranks = outcomes.values()
            return [_joined(of_case) for of_case in zip(*of_ranks, strict=True)]
        story = _death(outcomes)
    except RanksHungError as error:
        story = str(error)
    return [story] if len(cases) == 1 else [judge(pool, [case])[0] for case in cases]


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case that still fails, found in a limited number of tries."""
    num_tries, smaller = 0, simpler(case)
    while (tried := next(smaller, None)) is not None and num_tries < _MAX_TRIES:
        if tried != case:
            num_tries += 1
            if fails(tried):
                case, smaller = tried, simpler(tried)
    return case


def _selected(options: argparse.Namespace) -> Iterator[tuple[int, Case]]:
    if options.text is not None:
        yield 0, Case.from_text(options.text)
    else:
        numbers = range(options.first, options.first + options.cases)
        for number in numbers if options.case is None else [options.case]:
            yield number, draw(options.seed, number)


def _together(cases: dict[int, Case]) -> Iterator[list[int]]:
    """Yield the numbers of cases that run together: a few with the same number of ranks."""
    waiting: dict[int, list[int]] = {}
    for number, case in cases.items():
        of_ranks = waiting.setdefault(case.num_ranks, [])
        of_ranks.append(number)
        if len(of_ranks) == _AT_ONCE:
            yield waiting.pop(case.num_ranks)
    yield from waiting.values()


def _joined(of_ranks: Iterable[str | None]) -> str | None:
    stories = list(of_ranks)
    lines = [f"rank {rank}: {story}" for rank, story in enumerate(stories) if story]
    if not lines and any(story is not None for story in stories):
        return "rank ?: RemoteStageError: every rank ended because of another"
    return "\n".join(lines) or None


def _kind(story: str | None) -> str | None:
    """Return what failures of one kind have in common: the exception and what was compared."""
    return None if story is None else ":".join(story.splitlines()[0].split(":")[1:3]).split("[")[0]


def _death(outcomes: Outcomes) -> str:
    return "\n".join(str(outcome) for outcome in outcomes if outcome.error is not None)


def _report(pool: Pool, options: argparse.Namespace, number: int, case: Case, story: str) -> None:
    print(f"\ncase {number} fails: {case}\n{story}")
    if options.text is None:
        print(f"repeat it with: python -m benchmarks fuzz --seed {options.seed} --case {number}")
    small = smallest(case, lambda tried: _kind(judge(pool, [tried])[0]) == _kind(story))
    if small != case:
        print(f"smaller: python -m benchmarks fuzz --text '{small.to_text()}'")
        print(judge(pool, [small])[0], flush=True)


def _tabulate(cases: Iterable[Case], took_s: float) -> Table:
    num = Counter((case.schedule, case.num_ranks) for case in cases)
    num_exact = sum(case.is_exact for case in cases)
    rows: list[list[Cell]] = [[name, *(num[name, n] for n in (1, 2, 3, 4))] for name in SCHEDULES]
    notes = [
        f"{num.total()} cases without a difference in {took_s:.0f} s",
        f"{num_exact} of them to the last bit",
    ]
    headings = ["schedule", *(f"{n} ranks" for n in (1, 2, 3, 4))]
    return Table("cases, each beside the plain model", headings, rows, ["d"] * 4, notes)
