"""Seconds a step of every contender, beside the limit of the machine.

A pipeline's limit is the time of as many independent one-thread copies of the model at once, with
the bubble added. ``share`` is the part of the limit that is reached.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.contenders import CONTENDERS, COPIES, ONE_PROCESS, PROCPIPE, limit_s, notes
from benchmarks.report import Report, Table
from benchmarks.rounds import Times, launch, measure, ratio, spread
from benchmarks.workloads import WORKLOADS, Job

#: Steps a turn: about half a second, so that a turn's start and end do not count.
_NUM_STEPS = {"tiny": 40, "transformer": 1, "mlp": 1, "unet": 3}

#: The limit is measured beside every result, and all is compared with one process.
_ALWAYS = (PROCPIPE, ONE_PROCESS, COPIES)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    names = [name for name in CONTENDERS if name in {*options.contenders, *_ALWAYS}]
    m, n = options.micro_batches, options.stages
    figures: dict[str, Times] = {}
    tables = []
    for workload in options.workloads:
        job = Job(WORKLOADS[workload], n, m)
        absent = {name: CONTENDERS[name].why_not(job) for name in names}
        measured = launch(
            "benchmarks.throughput:measure_workload",
            n,
            workload=workload,
            m=m,
            names=[name for name in names if absent[name] is None],
            num_rounds=options.rounds,
            num_steps=_NUM_STEPS[workload],
        )
        figures[workload] = measured["times"]
        tables.append(tabulate(job, figures[workload], absent, measured["balance"]))
    return Report(
        "throughput",
        tables,
        figures,
        {name: value for name, value in vars(options).items() if name != "out"},
        draw=lambda figure: _draw(figure, figures, m, n),
    )


def measure_workload(
    workload: str, m: int, names: list[str], num_rounds: int, num_steps: int
) -> dict[str, Any]:
    """Measure contenders on this job's processes; every rank calls it.

    Returns:
        ``times``; and ``balance``, of the contenders with one partition a process.
    """
    import torch.distributed as dist

    job = Job(WORKLOADS[workload], dist.get_world_size(), m)
    steps = {name: CONTENDERS[name].make(job) for name in names}
    times = measure(steps, num_rounds=num_rounds, num_steps=num_steps)
    return {"times": times, "balance": job.balance(job.num_stages)}


def tabulate(job: Job, times: Times, absent: dict[str, str | None], balance: list[int]) -> Table:
    """Lay out a workload's times, with speed-ups over one process and shares of the limit."""
    m, n, workload = job.num_micro_batches, job.num_stages, job.workload
    limits_s = {
        bubble_free: [limit_s(s, m, n, is_bubble_free=bubble_free) for s in times[COPIES]]
        for bubble_free in (False, True)
    }
    alone_s = times[ONE_PROCESS]
    rows: list[list[Any]] = []
    for name, seconds in times.items():
        is_pipeline = name not in (ONE_PROCESS, COPIES, "one process, n threads", "torchgpipe")
        limit = limits_s[CONTENDERS[name].is_bubble_free]
        milliseconds = [s * 1e3 for s in seconds]
        rows.append(
            [
                name,
                statistics.median(milliseconds),
                min(milliseconds),
                max(milliseconds),
                None if name == COPIES else ratio(alone_s, seconds),
                spread(limit, seconds) if is_pipeline else None,
            ]
        )
    for name, limit in (("limit", limits_s[False]), ("limit without a bubble", limits_s[True])):
        rows.append([name, statistics.median(limit) * 1e3, *([None] * 4)])
        rows[-1][4] = ratio(alone_s, limit)
    return Table(
        f"{workload.name} ({workload.shows}): {workload.sizes}; {n} stages, m = {m}, no "
        "recomputation",
        ["", "ms a step", "min", "max", "speed-up", "share of limit"],
        rows,
        [".2f", ".2f", ".2f", ".2f", "s"],
        [f"balance: {balance}", *notes(times, absent)],
    )


def _draw(figure: Any, figures: dict[str, Times], m: int, n: int) -> None:
    """Draw each workload's speed-ups as bars, with its limits as lines."""
    axes = figure.subplots(1, len(figures), squeeze=False)[0]
    for axis, (workload, times) in zip(axes, figures.items(), strict=True):
        alone_s = times[ONE_PROCESS]
        shown = [name for name in times if name not in (ONE_PROCESS, COPIES)]
        speed_ups = [ratio(alone_s, times[name]) for name in shown]
        colours = ["tab:blue" if name == PROCPIPE else "lightgrey" for name in shown]
        axis.barh(shown, speed_ups, color=colours)
        axis.invert_yaxis()
        for bubble_free, style in ((False, "--"), (True, ":")):
            limit = [limit_s(s, m, n, is_bubble_free=bubble_free) for s in times[COPIES]]
            axis.axvline(ratio(alone_s, limit), color="black", linestyle=style, linewidth=1)
        axis.set_title(workload)
        if axis is not axes[0]:
            axis.tick_params(labelleft=len(shown) != len(axes[0].get_yticks()))
    figure.supxlabel("speed-up over one process (-- limit, ·· limit without a bubble)")
