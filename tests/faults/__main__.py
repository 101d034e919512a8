"""Faults in real jobs, round after round: each must end in time, with the right report.

    python -m tests.faults --rounds 100 [--seed S] [--first K] [--verbose] [--fresh]
    python -m tests.faults --rounds 0 --repeat-correct 100

A round is one job with one fault, drawn from the seed and its number. The exit code is 1 if any
went wrong; such a round prints its faults, its output and the command that repeats it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys

from tests.dist.forks import find_launch
from tests.faults.rounds import LARGE, Round, draw
from tests.faults.runner import TIME_LIMIT_S, Rounds


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
    rounds = Rounds(
        fresh=options.fresh,
        is_verbose=options.verbose,
        command=command,
        time_limit_s=options.time_limit,
    )
    print(f"seed {options.seed}", flush=True)
    for number in range(options.first, options.first + options.rounds):
        rounds.run(number, draw(options.seed, number, short=options.short))
    for number in range(options.repeat_correct):
        rounds.run(number, correct(options.seed))
    rounds.print_sums()
    return int(bool(rounds.sums["wrong"]))


def correct(seed: int) -> Round:
    """Return a job without a fault, with large tensors by sockets, which ends as Python does."""
    return dataclasses.replace(
        draw(seed, 0),
        what="nothing",
        when="between steps",
        where="between",
        origin=0,
        step=0,
        launcher="none",
        num_stages=2,
        replicas=1,
        rows=LARGE,
        transport="sockets",
        tears_down=True,
    )


if __name__ == "__main__":
    sys.exit(main())
