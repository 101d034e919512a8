"""How much of adding up gradients over replicas runs beside the pipeline.

    stage 1   B2 ──── B3 ────            its last backward ends first: sums run beside stage 0's
                        └ sum ─ sum ─
    stage 0      B2 ────  B3 ────        its first sums run beside its own last backward
                             └ sum ─ sum ─ └ only the last is waited for

Layers wait for a fixed time without using a core, so that there is time beside which the sums can
run, also on a machine with fewer cores than processes. The sums are real ones.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import Report, Table
from benchmarks.rounds import Step, Times, launch, measure
from benchmarks.workloads import Wait
from procpipe import Stage

NUM_STAGES, REPLICAS, NUM_MICRO_BATCHES = 2, 2, 4

_FREE, _BESIDE, _AFTER = "no sums", "sums beside the pipeline", "sums after it"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--layers", type=int, default=8, help="of a stage")
    parser.add_argument("--mib", type=int, default=12, help="of parameters in a layer")
    parser.add_argument("--forward-ms", type=float, default=80.0, help="of a stage's layers")
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> Report:
    settings = {
        "num_layers": options.layers,
        "mib": options.mib,
        "forward_s": options.forward_ms / 1e3,
        "num_rounds": options.rounds,
    }
    figures: dict[str, Times] = {
        schedule: launch(
            "benchmarks.replicas:measure_all", NUM_STAGES * REPLICAS, schedule=schedule, **settings
        )
        for schedule in options.schedules
    }
    return Report(
        "replicas",
        [tabulate(figures, options)],
        figures,
        settings,
    )


def tabulate(figures: dict[str, Times], options: argparse.Namespace) -> Table:
    """Lay out times, and which share of the sums' time is hidden."""
    rows: list[list[Any]] = []
    for name, times in figures.items():
        medians = [statistics.median(times[each]) * 1e3 for each in (_FREE, _BESIDE, _AFTER)]
        rows.append([name, *medians, hidden(times)])
    return Table(
        f"replicas: {NUM_STAGES} stages of {options.layers} layers of {options.mib} MiB, "
        f"{REPLICAS} replicas, {NUM_MICRO_BATCHES} micro-batches; a stage's layers wait "
        f"{options.forward_ms:g} ms forward and twice that backward",
        ["", _FREE, _BESIDE, _AFTER, "hidden"],
        rows,
        [".1f", ".1f", ".1f", ".0%"],
        [
            "ms a step; hidden: 1 - (beside - none) / (after - none), the median of the rounds",
            f"{_AFTER}: no_sync(), and then an all-reduce of each layer's gradient by hand",
        ],
    )


def hidden(times: Times) -> float:
    """Return the share of the sums' time that a step does not take longer for."""
    rounds = zip(times[_FREE], times[_BESIDE], times[_AFTER], strict=True)
    return statistics.median(1 - (beside - free) / (after - free) for free, beside, after in rounds)


def measure_all(
    schedule: str, num_layers: int, mib: int, forward_s: float, num_rounds: int
) -> Times:
    """Measure each contender; every rank calls it."""
    torch.manual_seed(0)
    layers = [Wait(forward_s / num_layers, mib << 18) for _ in range(NUM_STAGES * num_layers)]
    stage = Stage(
        nn.Sequential(*layers),
        [num_layers] * NUM_STAGES,
        chunks=NUM_MICRO_BATCHES,
        schedule=schedule,
        checkpoint="never",
        replicas=REPLICAS,
        loss_fn=nn.functional.mse_loss,
    )
    times = measure(_steps(stage), num_rounds=num_rounds, num_steps=1)
    stage.close()
    return times


def _steps(stage: Stage) -> dict[str, Step]:
    ranks = range(NUM_STAGES * REPLICAS)
    groups = [dist.new_group([*ranks[j::NUM_STAGES]]) for j in range(NUM_STAGES)]
    own_group = groups[stage.rank % NUM_STAGES]
    data = torch.zeros(NUM_MICRO_BATCHES, 4), torch.ones(NUM_MICRO_BATCHES, 4)

    def beside() -> None:
        for parameter in stage.parameters():
            parameter.grad = None
        stage.step(*data)

    def free() -> None:
        with stage.no_sync():
            beside()

    def after() -> None:
        free()
        for parameter in stage.parameters():
            dist.all_reduce(parameter.grad, group=own_group)

    return {_FREE: free, _BESIDE: beside, _AFTER: after}
