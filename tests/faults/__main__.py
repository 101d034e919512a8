"""Faults in real jobs, round after round: each must end in time, with the right report.

    python -m tests.faults --rounds 100 [--seed S] [--first K] [--verbose] [--fresh]
    python -m tests.faults --rounds 0 --repeat-correct 100

A round is one job with one fault, drawn from the seed and its number. The exit code is 1 if any
went wrong; such a round prints its faults, its output and the command that repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.dist.forks import find_launch
from tests.faults.rounds import correct, draw
from tests.faults.runner import TIME_LIMIT_S, run


def main() -> int:
    """Run the test from the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=100, help="0 for none")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--short", action="store_true", help="the rounds of make test")
    parser.add_argument("--fresh", action="store_true", help="start new interpreters, no forks")
    parser.add_argument("--repeat-correct", type=int, default=0, help="one job without a fault")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds a round")
    parser.add_argument("--verbose", action="store_true", help="print a line a round")
    options = parser.parse_args()
    find_launch()
    command = f"python -m tests.faults --seed {options.seed}"
    command += " --short" * options.short + " --fresh" * options.fresh
    numbers = range(options.first, options.first + options.rounds)
    rounds = {number: draw(options.seed, number, short=options.short) for number in numbers}
    rounds |= {-1 - number: correct(options.seed) for number in range(options.repeat_correct)}
    num_wrong = 0
    print(f"seed {options.seed}", flush=True)
    for number, round_ in rounds.items():
        start_s = time.monotonic()
        faults = run(
            number,
            round_,
            command=command,
            is_new=options.fresh,
            time_limit_s=options.time_limit,
        )
        num_wrong += bool(faults)
        if options.verbose:
            took_s, verdict = time.monotonic() - start_s, "WRONG" if faults else "ok"
            print(f"{number:4d} {verdict:5} {took_s:5.1f} s  {round_}", flush=True)
    print(f"{len(rounds)} rounds, {num_wrong} wrong")
    return int(bool(num_wrong))


if __name__ == "__main__":
    sys.exit(main())
