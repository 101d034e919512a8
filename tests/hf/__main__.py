"""``python -m tests.hf``: compares all models of docs/language_models.md, and prints its list."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.dist.forks import OF_HF, fork_server
from tests.dist.pool import Pool, Ranks
from tests.hf.cases import CASES
from tests.hf.compare import kinds_of, rows_of, summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hf", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all of the page")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    if unknown := {*options.names}.difference(CASES):
        parser.error(f"there is no {min(unknown)!r}, but {', '.join(CASES)}")
    fork_server().load(*OF_HF)
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = rows_of(
                lambda number: Ranks(pool, number),
                kinds_of(options.names or CASES),
                options.processes,
                Path(folder),
            )
    finally:
        pool.close()
    print(summary(found))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
