"""Fails if a room has more lines of Python than its budget in lines.toml.

Every line is a cost that each reader pays. A change that raises a budget says why in its commit.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Print each room that is over its budget, and return how many there are."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    num_lines = {
        name: len((ROOT / name).read_bytes().splitlines()) for name in listed.stdout.split()
    }
    budgets = tomllib.loads((ROOT / ".ci" / "lines.toml").read_text())
    over = 0
    for room, budget in budgets.items():
        total = sum(number for name, number in num_lines.items() if name.startswith(room))
        if total > budget:
            over += 1
            print(f"{room} has {total:,} lines of Python, of {budget:,}: see .ci/lines.py")
    return over


if __name__ == "__main__":
    sys.exit(main())
