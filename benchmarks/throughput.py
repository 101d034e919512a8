"""Seconds a step of every contender and schedule, beside the limit of the machine.

A pipeline's limit is the time of as many independent one-thread copies of the model at once, with
the bubble added. ``share of limit`` is the part of it that is reached. The workload ``tiny`` has
layers so small that nearly all of its time is the host's cost of a task. Where all is recomputed, a
step has 1.33 times the work: a forward is about a third of forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.contenders import (
    BARE,
    CONTENDERS,
    COPIES,
    ONE_PROCESS,
    PROCPIPE,
    SCHEDULES,
    THREADS,
    limit_s,
    notes,
)
from benchmarks.report import (
    OF_BARE,
    OF_ONE,
    OF_TORCH,
    SHARE,
    TORCHS_SHARE,
    Report,
    Table,
)
from benchmarks.rounds import Step, Times, launch, measure, ratio, spread
from benchmarks.workloads import SIZES, Job

DEVICES = ("cpu", "cuda")

#: Micro-batches: the host's cost of a task differs most with their number.
_NUM_MICRO_BATCHES = {"tiny": [16, 64]}

#: Micro-batches a turn: about a third of a second, so that a turn's start and end do not count.
_NUM_IN_A_TURN = {"tiny": 960}

#: The limit is measured beside every result, and all is compared with one process.
_ALWAYS = (PROCPIPE, ONE_PROCESS, COPIES)

#: What is not compared with the limit of a pipeline.
_NO_PIPELINES = (ONE_PROCESS, COPIES, THREADS, "torchgpipe", "torchgpipe always")


def configure(parser: argparse.ArgumentParser) -> None:
    names = list({name: None for workloads in SIZES.values() for name in workloads})
    parser.add_argument("--workloads", nargs="+", choices=names, help="by default all of a size")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", help="by default 8; tiny: 16, 64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", help="of procpipe's large tensors")


def run(options: argparse.Namespace) -> Report:
    names = [name for name in CONTENDERS if name in {*options.contenders, *_ALWAYS}]
    figures: dict[str, Times] = {}
    tables = []
    ratios: dict[str, dict[str, float]] = {}
    for workload in options.workloads or SIZES[options.sizes]:
        for m in options.micro_batches or _NUM_MICRO_BATCHES.get(workload, [8]):
            job = Job(
                SIZES[options.sizes][workload], options.stages, m, options.device, options.transport
            )
            what = f"{workload}, m = {m}"
            print(f"throughput: {what}", flush=True)
            absent = {name: CONTENDERS[name].why_not(job) for name in names}
            measured = launch(
                "benchmarks.throughput:measure_workload",
                options.stages,
                device=options.device,
                workload=workload,
                m=m,
                names=[name for name in names if absent[name] is None],
                num_rounds=options.rounds,
                num_steps=max(1, _NUM_IN_A_TURN.get(workload, m) // m),
                sizes=options.sizes,
                transport=options.transport,
            )
            figures[what] = measured["times"]
            tables.append(tabulate(job, figures[what], absent, measured["balance"]))
            ratios |= {f"{what}, {k}": v for k, v in ratios_of(job, figures[what]).items()}
    return Report(
        "throughput",
        tables,
        figures,
        {name: value for name, value in vars(options).items() if name != "out"},
        ratios=ratios,
        one_process={what: times[ONE_PROCESS] for what, times in figures.items()},
    )


def measure_workload(
    workload: str,
    m: int,
    names: list[str],
    num_rounds: int,
    num_steps: int,
    sizes: str = "small",
    transport: str | None = None,
) -> dict[str, Any]:
    """Measure contenders on this job's processes; every rank calls it.

    Returns:
        ``times``; and ``balance``, of the contenders with one partition a process.
    """
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = Job(SIZES[sizes][workload], dist.get_world_size(), m, device, transport)
    steps = {name: CONTENDERS[name].make(job) for name in names}
    if job.workload.is_autocast:
        steps = {name: _in_bfloat16(step, device) for name, step in steps.items()}
    times = measure(steps, num_rounds=num_rounds, num_steps=num_steps)
    return {"times": times, "balance": job.balance(job.num_stages)}


def _in_bfloat16(step: Step, device: str) -> Step:
    def whole() -> None:
        with torch.autocast(device, torch.bfloat16):
            step()

    return whole


# -- tables ---------------------------------------------------------------------------------------


def ratios_of(job: Job, times: Times) -> dict[str, dict[str, float]]:
    """Return procpipe's ratios by schedule, to the peer with the same schedule and to the rest."""
    found = {}
    for schedule, (ours, theirs) in SCHEDULES.items():
        if ours not in times:
            continue
        of_schedule = {OF_ONE: ratio(times[ours], times[ONE_PROCESS])}
        if theirs is not None and theirs in times:
            of_schedule[OF_TORCH] = ratio(times[ours], times[theirs])
        for share, name in ((SHARE, ours), (TORCHS_SHARE, theirs)):
            if name is not None and name in times and COPIES in times:
                of_schedule[share] = ratio(_limits_s(job, times, name), times[name])
        if schedule == "GPipe" and BARE in times:
            of_schedule[OF_BARE] = ratio(times[ours], times[BARE])
        found[schedule] = of_schedule
    return found


def _limits_s(job: Job, times: Times, name: str) -> list[float]:
    """Return the limit of a contender in each round."""
    m, n = job.num_micro_batches, job.num_stages
    is_bubble_free = CONTENDERS[name].is_bubble_free
    return [limit_s(s, m, n, is_bubble_free=is_bubble_free) for s in times[COPIES]]


def tabulate(job: Job, times: Times, absent: Mapping[str, str | None], balance: list[int]) -> Table:
    """Lay out a workload's times, with speed-ups over one process and shares of the limit."""
    m, n, workload = job.num_micro_batches, job.num_stages, job.workload
    alone_s, peer_s = times[ONE_PROCESS], times.get("torch GPipe")
    rows: list[list[Any]] = []
    limits: Times = {}
    for name, is_bubble_free in (("limit", False), ("limit without a bubble", True)):
        if COPIES in times:
            limits[name] = [limit_s(s, m, n, is_bubble_free=is_bubble_free) for s in times[COPIES]]
    for name, seconds in (times | limits).items():
        is_compared = bool(limits) and name in times and name not in _NO_PIPELINES
        rows.append(
            [
                name,
                *(of(seconds) * 1e3 for of in (statistics.median, min, max)),
                statistics.median(seconds) * 1e6 / (2 * m),
                None if peer_s is None or name == COPIES else ratio(seconds, peer_s),
                None if name == COPIES else ratio(alone_s, seconds),
                spread(_limits_s(job, times, name), seconds) if is_compared else None,
            ]
        )
    headings = ["", "ms a step", "min", "max", "us a task", "of torch GPipe", "speed-up"]
    return Table(
        f"{workload.name} ({workload.shows}): {workload.sizes}; {n} stages on {job.device}, "
        f"m = {m}",
        [*headings, "share of limit"],
        rows,
        [".2f", ".2f", ".2f", ".0f", ".2f", ".2f", "s"],
        [f"balance: {balance}; us a task: step time / 2m", *notes(times, absent)],
    )
