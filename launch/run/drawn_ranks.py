"""Which rank runs which stage of which replica, drawn before a run.

The launcher starts ranks, and only the script divides them into replicas. So the number of replicas
is read from arguments and the script's text, without running the script:

    procpipe run --dry-run --replicas 2 …      given for the drawing
    … train.py --replicas 2                    an argument of the script
    Stage(model, replicas=2, …)                a number in the script
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from procpipe.job.grid import Grid

_OPTION = "--replicas"


def replicas_of(options: argparse.Namespace) -> tuple[int, str]:
    """Return the number of replicas, 1 if it is not known; and what is wrong with it, if anything.

    Only a number that the user has given for the drawing, or to the script, can be wrong.
    """
    found, source = options.replicas, _OPTION
    if found is None:
        found, source = _of_arguments(options.script_args), "the script's --replicas"
    if found is None and not options.module:
        found, source = _of_script(Path(options.script)), f"{options.script}: replicas"
    least, most = options.nnodes
    num_ranks = options.nproc * least
    if found is None or found < 1:
        return 1, ""
    if least == most and num_ranks % found:
        fits = ", ".join(str(r) for r in range(1, num_ranks + 1) if num_ranks % r == 0)
        return 1, (
            f"{source} is {found}, but there are {num_ranks} processes, which are stages times "
            f"replicas: start a multiple of {found}, or use replicas that divide {num_ranks}: "
            f"{fits}"
        )
    return found, ""


def drawn(num_local: int, num_hosts: int, num_replicas: int, *, has_gpus: bool) -> str:
    """Draw the ranks: a row for each replica, a column for each stage.

    With GPUs, each process of a host has the one of its number.
    """
    grid = Grid(0, num_local * num_hosts, num_replicas)
    rows = [["", *(f"stage {stage}" for stage in range(grid.num_stages))]]
    for replica in range(num_replicas):
        ranks = [grid.rank_of(stage, replica) for stage in range(grid.num_stages)]
        cells = [[f"rank {rank}"] for rank in ranks]
        for rank, cell in zip(ranks, cells, strict=True):
            cell += [f"host {rank // num_local}"] if num_hosts > 1 else []
            cell += [f"GPU {rank % num_local}"] if has_gpus else []
        rows.append([f"replica {replica}", *map(", ".join, cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _of_arguments(words: Sequence[str]) -> int | None:
    """Return the number after ``--replicas`` among a script's arguments."""
    for word, following in pairwise([*words, ""]):
        name, is_joined, value = word.partition("=")
        if name == _OPTION:
            return _number(value if is_joined else following)
    return None


def _of_script(path: Path) -> int | None:
    """Return the number that a script gives as ``Stage(…, replicas=…)``; None if it computes it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Stage":
            for keyword in node.keywords:
                if keyword.arg == "replicas" and isinstance(keyword.value, ast.Constant):
                    return _number(str(keyword.value.value))
    return None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
