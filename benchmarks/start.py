"""Seconds from the launch to the end of the first step, and where they go.

Each launch is torchrun itself, timed from outside, and starts the script of one contender (see
``start_worker.py``); contenders take turns. A point counts when the last process is there:

    launch ── process ── torch ── library ── built ── first step ── second step ── end
           torchrun    import torch    |     model,      connects   |               all processes
           starts      import the contender  group       and trains | trains        have ended
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import OF_BARE, OF_TORCH, Report, Table
from benchmarks.rounds import ratio
from benchmarks.start_worker import CONTENDERS

_FLOOR = "bare gloo"

_POINTS = ("process", "torch", "library", "built", "first step", "second step", "end")

_LAUNCH_LIMIT_S = 120.0

#: Seconds from the launch to each point, of each launch.
Launches = Sequence[Mapping[str, float]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, nargs="+", choices=(2, 4, 8), default=[2])
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    figures: dict[int, dict[str, list[dict[str, float]]]] = {}
    for n in options.processes:
        figures[n] = {name: [] for name in CONTENDERS}
        for _ in range(options.rounds):
            for name, launches in figures[n].items():
                launches.append(_launch(name, n))
    tables = [tabulate(n, by_name) for n, by_name in figures.items()]
    settings = vars(options) | {"out": str(options.out)}
    ratios = {f"start of {n} processes": ratios_of(by_name) for n, by_name in figures.items()}
    return Report("start", tables, figures, settings, ratios=ratios)


def ratios_of(by_name: Mapping[str, Launches]) -> dict[str, float]:
    """Return procpipe's ratios of the time to the end of the first step."""
    ours, *others = (
        _to_first_step_s(by_name[name]) for name in ("procpipe", "torch GPipe", _FLOOR)
    )
    return dict(zip((OF_TORCH, OF_BARE), (ratio(ours, other) for other in others), strict=True))


def tabulate(n: int, by_name: Mapping[str, Launches]) -> Table:
    """Lay out the time to the end of the first step, and its parts."""
    rows: list[list[Any]] = []
    for name, launches in by_name.items():
        first_s = _to_first_step_s(launches)
        parts = [part for part in parts_s(launches).items() if part[0] != "end"]
        rows.append(
            [name, statistics.median(first_s), min(first_s), max(first_s)]
            + [ratio(first_s, _to_first_step_s(by_name[_FLOOR]))]
            + [seconds for _, seconds in parts]
        )
    return Table(
        f"start: seconds from torchrun's launch to the end of the first step, {n} processes "
        f"on {os.cpu_count()} cores",
        ["", "s", "min", "max", f"of {_FLOOR}", *(f"+ {point}" for point in _POINTS[:-1])],
        rows,
        [".2f"] * 10,
        [
            "+: seconds to each point from the one before it, at the last process there; medians",
            "process: torchrun starts Python; procpipe connects as it is built, the others "
            "before they are built",
            f"{_FLOOR}, first step: backward(gradient) has torch.autograd import sympy, which "
            "torch GPipe's library has imported already and procpipe does without",
        ],
    )


def parts_s(launches: Launches) -> dict[str, float]:
    """Return the median seconds to each point from the one before it."""
    before = {point: previous for previous, point in pairwise(_POINTS)}
    return {
        point: statistics.median(
            launch[point] - (launch[before[point]] if point in before else 0.0)
            for launch in launches
        )
        for point in _POINTS
    }


def _launch(name: str, n: int) -> dict[str, float]:
    """Launch one contender, and return the seconds to each point, at the last process there."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--local-addr=127.0.0.1", f"--nproc_per_node={n}",
            "-m", "benchmarks.start_worker", name, folder,
        ]  # fmt: skip
        variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        root = Path(__file__).parents[1]
        start_s = time.time()
        subprocess.run(command, env=variables, cwd=root, timeout=_LAUNCH_LIMIT_S, check=True)
        end_s = time.time()
        stamps = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    points = {point: max(of_rank[point] for of_rank in stamps) for point in _POINTS[:-1]}
    return {point: at_s - start_s for point, at_s in (points | {"end": end_s}).items()}


def _to_first_step_s(launches: Launches) -> list[float]:
    return [launch["first step"] for launch in launches]
