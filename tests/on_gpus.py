"""Runs the tests marked ``gpu``: on this machine's GPUs, or else on emulated ones (make test-gpu).

    python -m tests.on_gpus [--seed 0] [arguments of pytest]

Emulated are 1, 2, 4 and 8 GPUs in turn, with delays and starved streams. Each test runs with one of
these numbers, which the seed chooses among those that are enough for it; some run with every number
(tests/conftest.py). So another seed is another order of events, and other numbers of GPUs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

NUMBERS_OF_GPUS = (1, 2, 4, 8)

#: How long operations are delayed at most, and how long some streams do nothing unless waited for.
TIMING = ("--delay-us=100", "--starve-ms=20")

#: What pytest ends with where no test was chosen.
NO_TESTS = 5

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the tests; return 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpus", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all that emulated GPUs choose")
    arguments, of_pytest = parser.parse_known_args()
    pytest = [sys.executable, "-m", "pytest", *of_pytest]
    if sees_gpus():
        return run([*pytest, "--gpus"])[0]
    print(f"no CUDA device here: emulating GPUs, SEED={arguments.seed}", flush=True)
    begun_s = time.monotonic()
    worst, results = 0, []
    for number in NUMBERS_OF_GPUS:
        emulated = [sys.executable, "-m", "tests.emulated_gpu", f"--gpus={number}"]
        emulated += [f"--seed={arguments.seed}", *TIMING, "--"]
        code, counts = run([*emulated, *pytest, "--gpus=share"])
        worst = max(worst, 0 if code == NO_TESTS else abs(code))
        results.append(f"{number}: {counts}")
    print(
        f"emulated GPUs, SEED={arguments.seed}, {time.monotonic() - begun_s:.0f} s: "
        + "; ".join(results),
        flush=True,
    )
    return worst


def sees_gpus() -> bool:
    """Say whether torch can use a CUDA device here."""
    import torch

    return torch.cuda.is_available()


def run(command: list[str]) -> tuple[int, str]:
    """Run pytest; return its exit code, and its last line's counts."""
    counts = "no end"
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := re.search(r"\d+ (passed|failed|error|skipped|deselected).* in \d.*s", line):
                counts = found[0].strip("= ")
    return process.returncode, counts


if __name__ == "__main__":
    sys.exit(main())
