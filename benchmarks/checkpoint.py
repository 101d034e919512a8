"""What recomputation costs: each checkpoint mode, beside torchgpipe's."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.peers.ours import procpipe
from benchmarks.peers.torchgpipe_peer import NOTE, torchgpipe, why_not
from benchmarks.report import Report, Table, bars
from benchmarks.rounds import Times, launch, measure, ratio
from benchmarks.workloads import WORKLOADS, Job

_MODES = ("always", "except_last", "never")
_WORKLOAD = "transformer"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    m, n = options.micro_batches, options.stages
    times: Times = launch("benchmarks.checkpoint:measure_modes", n, m=m, num_rounds=options.rounds)
    rows: list[list[Any]] = []
    for name, seconds in times.items():
        never = times[f"{name.split()[0]} never"]
        rows.append([name, statistics.median(seconds) * 1e3, ratio(seconds, never)])
    notes = ["a forward is about a third of forward and backward: 1.33 if all is recomputed"]
    notes.append(f"not run: torchgpipe: {reason}" if (reason := why_not()) else NOTE)
    title = f"checkpoint: {WORKLOADS[_WORKLOAD].sizes}; {n} stages, m = {m}"
    table = Table(title, ["", "ms a step", "of never"], rows, [".0f", ".2f"], notes)
    return Report(
        "checkpoint",
        [table],
        times,
        {"stages": n, "micro_batches": m},
        draw=lambda figure: bars(
            figure, {_WORKLOAD: times}, "procpipe never", "time of a step, of procpipe's 'never'"
        ),
    )


def measure_modes(m: int, num_rounds: int) -> Times:
    """Measure each mode of each contender; every rank calls it."""
    import torch.distributed as dist

    job = Job(WORKLOADS[_WORKLOAD], dist.get_world_size(), m)
    steps = {f"procpipe {mode}": procpipe(job, mode) for mode in _MODES}
    if why_not() is None:
        steps |= {f"torchgpipe {mode}": torchgpipe(job, mode) for mode in _MODES}
    return measure(steps, num_rounds=num_rounds, num_steps=1)
