"""Runs the tests marked ``gpu``: on this machine's GPUs, or else on emulated ones (make test-gpu).

    python -m tests.on_gpus [--seeds "0 1 2"] [arguments of pytest]

Emulated are 1, 2, 4 and 8 GPUs, with delays and starved streams: as many of these runs at a time as
there are cores, up to 4, and each has GPUs of its own. Each test runs with one of these numbers,
which the seed chooses among those that are enough for it; some run with every number
(tests/conftest.py). So another seed is another order of events, and other numbers of GPUs. What a
run prints comes when it has ended, and of several seeds only if it has failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NUMBERS_OF_GPUS = (1, 2, 4, 8)

#: How long operations are delayed at most, and how long some streams do nothing unless waited for.
TIMING = ("--delay-us=100", "--starve-ms=20")

#: Runs at a time; more would need more than 16 GiB of memory.
MOST_RUNS = 4

#: What pytest ends with where no test was chosen.
NO_TESTS = 5

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the tests; return 0 if none failed."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.on_gpus", description=__doc__)
    parser.add_argument("--seeds", default="0", help='of what emulated GPUs choose: "0", or "0 1"')
    arguments, of_pytest = parser.parse_known_args()
    pytest = [sys.executable, "-m", "pytest", *of_pytest]
    if torch.cuda.is_available():
        return subprocess.run([*pytest, "--gpus"], cwd=ROOT, check=False).returncode
    seeds = [int(seed) for seed in arguments.seeds.split()]
    num_runs = min(len(os.sched_getaffinity(0)), MOST_RUNS)
    print(f"no CUDA device here: emulating GPUs, {num_runs} runs at a time", flush=True)
    pool = ThreadPoolExecutor(num_runs)
    try:
        # The longest first, so that the last of them do not run alone.
        runs = {
            (seed, number): pool.submit(run, pytest, number, seed, is_brief=len(seeds) > 1)
            for seed in seeds
            for number in sorted(NUMBERS_OF_GPUS, key=lambda number: number == 8 or -number)
        }
        worst = 0
        for seed in seeds:
            of_seed = {number: runs[seed, number].result() for number in NUMBERS_OF_GPUS}
            codes = [code for code, _ in of_seed.values()]
            # Not each number of GPUs needs a test of what was asked for.
            failed = (
                codes if set(codes) == {NO_TESTS} else [code for code in codes if code != NO_TESTS]
            )
            worst = max(worst, *failed)
            counts = "; ".join(f"{number}: {counts}" for number, (_, counts) in of_seed.items())
            print(f"emulated GPUs, SEED={seed}: {counts}", flush=True)
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)
        return 130
    return worst


def run(pytest: list[str], number: int, seed: int, *, is_brief: bool) -> tuple[int, str]:
    """Run pytest on so many emulated GPUs; return its exit code, and the counts that it printed.

    Prints what pytest has printed, if that is not to be brief or a test has failed.
    """
    env = dict(os.environ)
    # Without bytecode each process would compile what it imports.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    emulated = [sys.executable, "-m", "tests.emulated_gpu", f"--gpus={number}", f"--seed={seed}"]
    done = subprocess.run(
        [*emulated, *TIMING, "--", *pytest, "-p", "no:cacheprovider", "--gpus=share"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    code = abs(done.returncode)
    if code not in (0, NO_TESTS) or not is_brief:
        print(f"\n==== GPUs: {number}, SEED={seed}\n{done.stdout}", flush=True)
    counts = re.findall(r"\d+ (?:passed|failed|error|skipped|deselected).* in [^=\n]*", done.stdout)
    return code, counts[-1].strip() if counts else f"no end, exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
