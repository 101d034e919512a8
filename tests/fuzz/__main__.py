"""Random models, options and calls in a pipeline, beside the plain model: no case may differ.

    python -m tests.fuzz --seed 1 --cases 2000       what make fuzz SEED=1 CASES=2000 runs
    python -m tests.fuzz --seed 1 --case 17          only this case
    python -m tests.fuzz --this "Case(…)"            one that is written down

A case is drawn from the seed and its number alone. One that differs, fails or hangs is made smaller
for as long as it still fails, and printed with the commands that repeat it.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.dist.pool import Pool
from tests.fuzz.case import Case, Run, draw
from tests.fuzz.judge import explain, fault_of

#: Cases after which the pool gets new processes.
_CASES_A_POOL = 200


def main(words: list[str] | None = None) -> int:
    """Run the cases that the command line asks for; print those that fail, return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--case", type=int, help="run only the case of this number")
    parser.add_argument("--this", help="run only this case, in Python")
    options = parser.parse_args(words)
    numbers = range(options.cases) if options.case is None else [options.case]
    cases = {number: draw(options.seed, number) for number in numbers}
    if options.this:
        cases = {0: eval(options.this, {"Case": Case, "Run": Run})}
    failed, num_exact = [], 0
    start_s = time.monotonic()
    pool = Pool()
    try:
        for k, (number, case) in enumerate(cases.items(), 1):
            if fault := fault_of(pool, case):
                failed.append(number)
                print(f"\n{explain(pool, options.seed, number, case, fault)}", flush=True)
            num_exact += case.is_exact and not fault
            if k % _CASES_A_POOL == 0:
                pool.close()
    finally:
        pool.close()
    took_s = time.monotonic() - start_s
    print(f"seed {options.seed}: {len(cases)} cases in {took_s:.0f} s")
    print(f"{len(cases) - len(failed)} without a difference, {num_exact} of them to the last bit")
    if failed:
        print(f"{len(failed)} FAILED: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
