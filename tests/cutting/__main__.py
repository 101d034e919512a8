"""``python -m tests.cutting``: compares all models in all ways."""

from __future__ import annotations

import argparse
import sys

from tests.cutting.cases import CASES
from tests.cutting.compare import differences, steps, ways_of
from tests.dist.forks import fork_server
from tests.dist.pool import Pool, Ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cutting", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    if unknown := {*options.names}.difference(CASES):
        parser.error(f"there is no {min(unknown)!r}, but {', '.join(CASES)}")
    num_faults = 0
    fork_server().load("transformers")
    pool = Pool()
    try:
        for name in options.names or CASES:
            fault = f"not run: there is no {CASES[name].package}"
            if CASES[name].is_here:
                fault = compared(pool, name, options.processes)
                num_faults += bool(fault)
            print(f"{name}: {fault or 'equal'}", flush=True)
    finally:
        pool.close()
    return int(num_faults > 0)


def compared(pool: Pool, name: str, numbers: list[int]) -> str:
    """Return what of a model's pipelines is not the model; "" if all is."""
    faults = []
    for way in ways_of(name, numbers):  # one by one, as a result has all gradients
        try:
            found = Ranks(pool, way[-1]).run(steps, [way], world=False, timeout_s=300).values()
        except Exception as error:  # of any model
            faults.append(f"{way}: {str(error).rpartition('Error: ')[2]}"[:300])
        else:
            faults += differences(way, [of_rank[way] for of_rank in found])
    return "; ".join(faults[:2])


if __name__ == "__main__":
    sys.exit(main())
