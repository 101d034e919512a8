"""Random models, options and calls in a pipeline, beside the plain model: no case may differ.

    python -m tests.fuzz --seed 1 --cases 2000       what make fuzz SEED=1 CASES=2000 runs
    python -m tests.fuzz --seed 1 --case 17          only this case

A case is drawn from the seed and its number alone. One that differs, fails or hangs is made smaller
for as long as it still fails, and printed as a script.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.dist.pool import Pool
from tests.fuzz.case import Case, draw
from tests.fuzz.judge import explain, judge, together

#: Runs after which the pool gets new processes.
_RUNS_A_POOL = 10


def main() -> int:
    """Run the cases that the command line asks for; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--case", type=int, help="run only the case of this number")
    options = parser.parse_args()
    chosen = range(options.cases) if options.case is None else [options.case]
    return run(options.seed, {n: draw(options.seed, n) for n in chosen})


def run(seed: int, cases: dict[int, Case]) -> int:
    """Run cases by their numbers, print those that fail and a summary; return an exit code."""
    failed: list[int] = []
    passed: list[Case] = []
    start_s = time.monotonic()
    pool = Pool()
    try:
        for k, numbers in enumerate(together(cases)):
            if k % _RUNS_A_POOL == _RUNS_A_POOL - 1:
                pool.close()
                pool = Pool()
            faults = judge(pool, [cases[number] for number in numbers])
            for number, fault in zip(numbers, faults, strict=True):
                if fault is None:
                    passed.append(cases[number])
                else:
                    failed.append(number)
                    print(f"\n{explain(pool, seed, number, cases[number], fault)}", flush=True)
    finally:
        pool.close()
    took_s = time.monotonic() - start_s
    num_exact = sum(case.is_exact for case in passed)
    num_run = len(passed) + len(failed)
    print(f"seed {seed}: {num_run} cases in {took_s:.0f} s, {num_run / took_s:.1f} a second")
    print(f"{len(passed)} without a difference, {num_exact} of them to the last bit")
    if failed:
        print(f"{len(failed)} FAILED: {sorted(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
