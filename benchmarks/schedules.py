"""Schedules side by side: seconds a step, and the memory that each needs.

    timing   one launch a workload: every schedule in the same processes, in turns (rounds.py)
    memory   one launch a schedule: what a step adds to the largest process (memory.py)

A schedule with a shorter bubble is worth little if it holds more, so both are in one table.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import memory
from benchmarks.contenders import CONTENDERS, COPIES, ONE_PROCESS
from benchmarks.report import Report, Table
from benchmarks.rounds import Times, launch, ratio, spread
from benchmarks.workloads import WORKLOADS, Job

_MIB = 1 << 20
_REFERENCE = "procpipe 1F1B"

_SCHEDULES = (
    _REFERENCE,
    *("procpipe interleaved", "procpipe ZB-H1", "procpipe ZB-V"),
    *("torch 1F1B", "torch Interleaved1F1B", "torch ZBV"),
)

#: Steps a turn.
_NUM_STEPS = {"tiny": 20, "transformer": 1, "mlp": 1, "unet": 3}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=["transformer", "unet"]
    )
    parser.add_argument("--schedules", nargs="+", choices=_SCHEDULES, default=list(_SCHEDULES))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="measure time only")


def run(options: argparse.Namespace) -> Report:
    m, n = options.micro_batches, options.stages
    names = [name for name in _SCHEDULES if name in {*options.schedules, _REFERENCE}]
    figures: dict[str, Any] = {}
    tables = []
    for workload in options.workloads:
        job = Job(WORKLOADS[workload], n, m)
        absent = {name: why for name in names if (why := CONTENDERS[name].why_not(job))}
        present = [name for name in names if name not in absent]
        measured = launch(
            "benchmarks.throughput:measure_workload",
            n,
            workload=workload,
            m=m,
            names=[*present, ONE_PROCESS, COPIES],
            num_rounds=options.rounds,
            num_steps=_NUM_STEPS[workload],
        )
        added = {} if options.no_memory else _memory_of(present, workload, n, m)
        figures[workload] = {"times": measured["times"], "added_bytes": added}
        tables.append(tabulate(job, measured["times"], added, absent))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    return Report("schedules", tables, figures, settings, lambda figure: _draw(figure, figures))


def tabulate(job: Job, times: Times, added: dict[str, int], absent: dict[str, str]) -> Table:
    """Lay out a workload's times and bytes."""
    alone_s, n = times[ONE_PROCESS], job.num_stages
    no_bubble_s = [seconds / n for seconds in times[COPIES]]
    rows: list[list[Any]] = []
    for name, seconds in times.items():
        rows.append(
            [
                name,
                statistics.median(seconds) * 1e3,
                None if name == COPIES else spread(alone_s, seconds),
                None if name in (ONE_PROCESS, COPIES) else spread(times[_REFERENCE], seconds),
                added[name] / _MIB if name in added else None,
                added[name] / added[_REFERENCE] if name in added else None,
            ]
        )
    rows.append(["limit without a bubble", statistics.median(no_bubble_s) * 1e3])
    rows[-1] += [spread(alone_s, no_bubble_s), None, None, None]
    workload = job.workload
    return Table(
        f"{workload.name}: {workload.sizes}; {n} stages, m = {job.num_micro_batches}, no "
        "recomputation",
        ["", "ms a step", "speed-up", "1F1B's time / this", "MiB", "of 1F1B's"],
        rows,
        [".1f", "s", "s", ".0f", ".2f"],
        [
            "speed-up: over one process with one thread; medians of the ratios of each round, with "
            "their range",
            "MiB: what training adds to the largest process at the peak of a step, in processes of "
            "its own",
            "limit without a bubble: independent copies / n",
            *(f"not run: {name}: {why}" for name, why in absent.items()),
        ],
    )


def _memory_of(names: list[str], workload: str, n: int, m: int) -> dict[str, int]:
    found = {}
    for name in names:
        ranks = launch(
            "benchmarks.memory:measure",
            n,
            memory.ALLOCATOR,
            name=name,
            workload=f"speed {workload}",
            n=n,
            m=m,
            limit=None,
        )
        found[name] = max(of_rank["added"] for of_rank in ranks)
    return found


def _draw(figure: Any, figures: dict[str, Any]) -> None:
    """Draw each workload's schedules as points: memory to the right, speed-up upwards."""
    axes_of_all = figure.subplots(1, len(figures), squeeze=False)[0]
    for axes, (workload, of_workload) in zip(axes_of_all, figures.items(), strict=True):
        times, added = of_workload["times"], of_workload["added_bytes"]
        for name in times:
            if name in added:
                speed_up = ratio(times[ONE_PROCESS], times[name])
                colour = "tab:blue" if name.startswith("procpipe") else "grey"
                axes.plot(added[name] / _MIB, speed_up, "o", color=colour)
                axes.annotate(f" {name}", (added[name] / _MIB, speed_up), fontsize=8)
        axes.set_title(workload)
        axes.set_xlabel("MiB added to the largest process")
        axes.margins(0.25)
    axes_of_all[0].set_ylabel("speed-up over one process")
