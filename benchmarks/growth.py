"""What a task costs the host as micro-batches or processes grow in number.

Layers are tiny, so that nearly all is overhead. With more processes than cores, stages take turns
on a core and wall time shows little; the CPU time of all processes shows the host's cost:

    us a task        step time / 2m                         m: number of micro-batches
    CPU us a task    CPU time of all ranks / 2mn            n: number of processes, of stages
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from benchmarks.report import Report, Table
from benchmarks.rounds import Step, Times, launch, measure, ratio
from benchmarks.workloads import WORKLOADS, Job

_OURS, _PEER, _ALONE = _NAMES = ("procpipe", "torch GPipe", "one process")

#: Stages while micro-batches grow in number; micro-batches while processes do.
_NUM_STAGES, _NUM_MICRO_BATCHES = 2, 32

#: As many as the tiny workload has on two stages.
_LAYERS_A_STAGE = 4

#: Micro-batches of a turn: so many that its start and end hardly count.
_A_TURN = 128


class Cost(NamedTuple):
    """Seconds a step of each contender in each round.

    m: number of micro-batches    n: number of processes
    """

    m: int
    n: int
    wall: Times
    cpu: Times


def configure(parser: argparse.ArgumentParser) -> None:
    powers = [1 << k for k in range(9)]
    parser.add_argument("--micro-batches", type=int, nargs="+", default=powers)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    by_m = _launch(_NUM_STAGES, options.micro_batches, options.rounds)
    by_n = [
        cost for n in options.processes for cost in _launch(n, [_NUM_MICRO_BATCHES], options.rounds)
    ]
    tables = [tabulate("m", by_m), tabulate("n", by_n)]
    figures = {"m": [cost._asdict() for cost in by_m], "n": [cost._asdict() for cost in by_n]}
    settings = vars(options) | {"out": str(options.out)}
    return Report("growth", tables, figures, settings, lambda figure: _draw(figure, by_m, by_n))


def tabulate(grows: str, costs: Sequence[Cost]) -> Table:
    """Lay out costs, one line for each m or n."""
    rows: list[list[Any]] = []
    for cost in costs:
        wall, cpu = _micros(cost)
        rows.append([str(getattr(cost, grows)), *(wall[name] for name in _NAMES)])
        rows[-1].append(ratio(cost.wall[_OURS], cost.wall[_PEER]))
        rows[-1] += [cpu[name] for name in _NAMES]
        rows[-1].append(ratio(cost.cpu[_OURS], cost.cpu[_PEER]))
    rest = {"m": f"n = {costs[0].n}", "n": f"m = {costs[0].m}"}[grows]
    what = {"m": "micro-batches m", "n": "processes n"}[grows]
    return Table(
        f"growth with the number of {what}: {_LAYERS_A_STAGE} x Linear(16, 16) a stage, "
        f"micro-batch 4; {rest}, {os.cpu_count()} cores",
        [
            *(grows, *(f"{name}, us" for name in _NAMES), f"of {_PEER}"),
            *(*(f"{name}, CPU us" for name in _NAMES), f"of {_PEER}"),
        ],
        rows,
        [*([".0f"] * 3), ".2f"] * 2,
        [
            "us a task: step time / 2m; CPU us a task: CPU time of all ranks / 2mn, with that of "
            "waiting",
            f"{_ALONE}: the same layers, on rank 0",
        ],
    )


def measure_costs(ms: list[int], rounds: int) -> list[Cost]:
    """Measure with each number of micro-batches; every rank calls it."""
    import torch.distributed as dist

    from benchmarks.peers.alone import one_process
    from benchmarks.peers.ours import stage_of, step_of
    from benchmarks.peers.torch_pipelining import gpipe

    n = dist.get_world_size()
    costs = []
    for m in ms:
        job = _job(m, n)
        stage = stage_of(job)
        steps = {_OURS: step_of(stage, job), _PEER: gpipe(job), _ALONE: one_process(job)}
        cpu: Times = {name: [] for name in steps}
        counted = {name: _counted(step, cpu[name]) for name, step in steps.items()}
        num_steps = max(1, _A_TURN // m)
        wall = measure(counted, num_rounds=rounds, num_steps=num_steps)
        stage.close()
        costs.append(Cost(m, n, wall, _of_all_ranks(cpu, num_steps)))
    return costs


def _launch(n: int, ms: Sequence[int], rounds: int) -> list[Cost]:
    costs = launch("benchmarks.growth:measure_costs", n, ms=list(ms), rounds=rounds)
    return [Cost(*cost) for cost in costs]


def _job(m: int, n: int) -> Job:
    def layers() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(_LAYERS_A_STAGE * n)])

    return Job(replace(WORKLOADS["tiny"], model=layers), n, m)


def _counted(step: Step, seconds: list[float]) -> Step:
    """Note the CPU seconds of this process, all its threads, in each step."""

    def counted() -> None:
        start_s = time.process_time()
        step()
        seconds.append(time.process_time() - start_s)

    return counted


def _of_all_ranks(cpu: Times, num_steps: int) -> Times:
    """Add up all ranks' CPU seconds a step, turn by turn; the first turn is not counted."""
    import torch.distributed as dist

    ours = {
        name: [
            statistics.fmean(seconds[start : start + num_steps])
            for start in range(num_steps, len(seconds), num_steps)
        ]
        for name, seconds in cpu.items()
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, ours)
    return {
        name: [sum(turn) for turn in zip(*(of_rank[name] for of_rank in ranks), strict=True)]
        for name in cpu
    }


def _micros(cost: Cost) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median microseconds a task, by wall and by CPU time."""
    tasks = 2 * cost.m
    wall = {name: statistics.median(s) * 1e6 / tasks for name, s in cost.wall.items()}
    cpu = {name: statistics.median(s) * 1e6 / (tasks * cost.n) for name, s in cost.cpu.items()}
    return wall, cpu


def _draw(figure: Any, by_m: Sequence[Cost], by_n: Sequence[Cost]) -> None:
    """Draw microseconds a task: wall time as lines, CPU time dashed."""
    left, right = figure.subplots(1, 2)
    for axis, costs, grows in ((left, by_m, "m"), (right, by_n, "n")):
        at = [getattr(cost, grows) for cost in costs]
        micros = [_micros(cost) for cost in costs]
        for place, name in enumerate(_NAMES):
            for kind, style in ((0, "-"), (1, "--")):
                label = f"{name}, CPU" if kind else name
                values = [of_cost[kind][name] for of_cost in micros]
                axis.plot(at, values, style, marker=".", color=f"C{place}", label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(at, [str(number) for number in at])
        axis.set_xlabel({"m": "micro-batches m", "n": "processes n"}[grows])
        axis.grid(alpha=0.3, which="both")
    left.set_ylabel("us a task")
    left.legend(fontsize=8)
