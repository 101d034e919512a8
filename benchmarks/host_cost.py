"""What a pipeline costs the host: tiny layers, so that nearly all time is overhead."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.contenders import CONTENDERS, COPIES, ONE_PROCESS, limit_s, notes
from benchmarks.report import Report, Table, bars
from benchmarks.rounds import Times, launch, spread
from benchmarks.workloads import WORKLOADS, Job

_NUM_STAGES = 2
_PEER = "torch GPipe"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> Report:
    figures: dict[int, Times] = {}
    tables = []
    for m in options.micro_batches:
        job = Job(WORKLOADS["tiny"], _NUM_STAGES, m)
        absent = {name: CONTENDERS[name].why_not(job) for name in CONTENDERS}
        measured = launch(
            "benchmarks.throughput:measure_workload",
            _NUM_STAGES,
            workload="tiny",
            m=m,
            names=[name for name in CONTENDERS if absent[name] is None],
            num_rounds=options.rounds,
            num_steps=max(1, 320 // m),
        )
        figures[m] = measured["times"]
        tables.append(_tabulate(job, figures[m], absent))
    return Report(
        "host_cost",
        tables,
        figures,
        {"rounds": options.rounds},
        draw=lambda figure: bars(
            figure,
            {f"m = {m}": times for m, times in figures.items()},
            ONE_PROCESS,
            "time of a step, of that of one process",
        ),
    )


def _tabulate(job: Job, times: Times, absent: dict[str, str | None]) -> Table:
    m, workload = job.num_micro_batches, job.workload
    rows: list[list[Any]] = []
    limit = [limit_s(seconds, m, job.num_stages) for seconds in times[COPIES]]
    for name, seconds in [*times.items(), ("limit", limit)]:
        micros = [s * 1e6 / (2 * m) for s in seconds]
        rows.append(
            [name, statistics.median(micros), min(micros), max(micros)]
            + [spread(seconds, times[base]) for base in (_PEER, ONE_PROCESS)]
        )
    return Table(
        f"host cost: {workload.sizes}; {job.num_stages} stages, m = {m}, no recomputation",
        ["", "us a task", "min", "max", f"of {_PEER}", f"of {ONE_PROCESS}"],
        rows,
        [".0f", ".0f", ".0f", "s", "s"],
        ["us a task: step time / 2m", *notes(times, absent)],
    )
