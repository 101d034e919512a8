"""What each component of the pipeline is worth: added one after the other, with timelines.

The published ablation adds torchgpipe's components to a U-Net (5, 64) on four GPUs. Here a
U-shaped model of four stages has tasks that take a fixed time without using a core, and real
messages; so the times depend on the order of tasks and transfers only, also on a machine with
fewer cores than stages. The messages go by gloo, which reports when one has arrived; a last row
has them in shared memory, the default on one host. ``--full`` is the published U-Net, on GPUs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.published import timeline
from benchmarks.published.figures import ABLATION, TORCHGPIPE, Ablation
from benchmarks.published.switches import Components, SwitchedStage
from benchmarks.published.waiting import BALANCE, waiting_unet
from benchmarks.report import Cell, Report, Table
from benchmarks.rounds import Step, launch, measure, ratio
from examples.models.unet import unet
from procpipe import Stage
from procpipe.job.world import World
from procpipe.plan.schedules.gpipe import gpipe, recomputed
from procpipe.planner import Costs, simulate

NUM_STAGES = 4

#: All components, and the transport that needs no waiting at all.
SHARED_MEMORY = "all, over shared memory"

#: In the order of the published ones.
VARIANTS = {
    "clock cycles only": Components(ordered=False, beside=False, direct=False),
    "+ ordered backward, early recomputation": Components(beside=False, direct=False),
    "+ transfers beside compute": Components(direct=False),
    "+ direct skips": Components(),
}

#: What ``measure_variants`` returns.
Figures = Mapping[str, Mapping[str, Any]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="the published U-Net, on 4 GPUs")
    parser.add_argument("--task-ms", type=float, default=40.0, help="a forward; backward is twice")
    parser.add_argument("--mib", type=int, default=16, help="size of a message, and of each skip")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    if options.full and torch.cuda.device_count() < NUM_STAGES:
        raise SystemExit(
            f"--full needs {NUM_STAGES} GPUs, but this machine has {torch.cuda.device_count()}"
        )
    names = list(VARIANTS) if options.full else [*VARIANTS, SHARED_MEMORY]
    figures: dict[str, Any] = {}
    for group in [[name] for name in names] if options.full else [names]:  # memory apart
        figures |= launch(
            "benchmarks.published.ablation:measure_variants",
            NUM_STAGES,
            names=group,
            full=options.full,
            task_s=options.task_ms / 1e3,
            mib=options.mib,
            m=options.micro_batches,
            num_rounds=options.rounds,
        )
    losses = {name: figures[name]["loss"] for name in names}
    if not options.full and len(set(losses.values())) > 1:  # the full model has dropout
        raise RuntimeError(f"the variants do not compute the same: losses {losses}")
    return Report(
        "ablation",
        [tabulate(figures, options)],
        figures,
        {name: value for name, value in vars(options).items() if name != "out"},
        draw=lambda figure: timeline.draw(
            figure, {name: [stage["tasks"] for stage in figures[name]["stages"]] for name in names}
        ),
    )


# -- in the processes that are launched -----------------------------------------------------------


def measure_variants(
    names: list[str], full: bool, task_s: float, mib: int, m: int, num_rounds: int
) -> Figures:
    """Measure variants in turns; every rank calls it.

    Returns:
        By variant: ``times``, seconds a step; ``loss``; and ``stages``, of each stage ``busy``,
        its share of time in tasks; ``memory_bytes``, that torch reserved, 0 on CPUs;
        ``sent_bytes`` a step; and ``tasks``, the timeline of one more step.
    """
    make = _published if full else _waiting
    pairs = {name: make(name, task_s, mib, m) for name in names}
    steps = {name: step for name, (_, step) in pairs.items()}
    times = measure(steps, num_rounds=num_rounds, num_steps=1)
    figures = {}
    for name, (stage, step) in pairs.items():
        dist.barrier()  # so that the timelines of all stages begin at once
        loss = step()
        of_stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_stages, _figures_of(stage))
        figures[name] = {"times": times[name], "loss": loss, "stages": of_stages}
    return figures


def _waiting(name: str, task_s: float, mib: int, m: int) -> tuple[Stage, Step]:
    """Make a stage of the model that waits, with a message of so many MiB a micro-batch."""
    World.transport = "shm" if name == SHARED_MEMORY else "sockets"
    stage = SwitchedStage(
        waiting_unet(task_s),
        BALANCE,
        VARIANTS.get(name, Components()),
        chunks=m,
        loss_fn=lambda output: output.mean(),
    )
    input = torch.ones(m, mib << 18)
    return stage, lambda: float(stage.step(input))


def _published(name: str, task_s: float, mib: int, m: int) -> tuple[Stage, Step]:
    """Make a stage of the published experiment, which ignores the given sizes."""
    stage = SwitchedStage(
        unet(5, 5, 64),
        [34, 76, 70, 61],
        VARIANTS[name],
        chunks=8,
        loss_fn=F.binary_cross_entropy_with_logits,
    )
    input = torch.rand(128, 3, 192, 192, device=stage.device)
    target = torch.ones(128, 1, 192, 192, device=stage.device)
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)

    def step() -> float:
        loss = stage.step(input, target)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize(stage.device)
        return float(loss)

    return stage, step


def _figures_of(stage: Stage) -> dict[str, Any]:
    counts = stage.statistics()
    memory_bytes = 0
    if stage.device.type == "cuda":
        memory_bytes = torch.cuda.max_memory_reserved(stage.device)
    return {
        "busy": 1.0 - counts.bubble,
        "memory_bytes": memory_bytes,
        "sent_bytes": sum(counts.sent_bytes.values()) // counts.num_steps,
        "tasks": [(str(t.task), t.start_s, t.end_s) for t in stage.last_step()],
    }


# -- the table ------------------------------------------------------------------------------------


def tabulate(figures: Figures, options: argparse.Namespace) -> Table:
    """Lay out each variant beside its published figures."""
    first = figures[next(iter(VARIANTS))]["times"]
    rows: list[list[Cell]] = []
    for name, published in zip_longest(figures, ABLATION):
        of_variant = figures[name]
        stages = of_variant["stages"]
        rows.append(
            [
                name,
                statistics.median(of_variant["times"]) * 1e3,
                ratio(first, of_variant["times"]),
                100 * statistics.mean(stage["busy"] for stage in stages),
                sum(stage["sent_bytes"] for stage in stages) / 2**20,
                sum(stage["memory_bytes"] for stage in stages) / 2**20 or None,
                *(_cells(published) if published else [None] * 4),
            ]
        )
    headings = ["", "ms a step", "speed-up", "busy %", "MiB sent", "MiB reserved"]
    headings += ["| published", "speed-up", "busy %", "GiB used"]
    return Table(
        f"ablation: {NUM_STAGES} stages, {_described(options)}",
        headings,
        rows,
        [".0f", ".2f", ".0f", ".0f", ".0f", "s", ".2f", ".0f", ".1f"],
        _notes(options),
    )


def _cells(published: Ablation) -> list[Cell]:
    return [
        published.components,
        published.samples_per_s / ABLATION[0].samples_per_s,
        100 * published.utilization,
        published.memory_gib,
    ]


def _described(options: argparse.Namespace) -> str:
    if options.full:
        return "U-Net (5, 64), 128 images of 192 x 192 in 8 micro-batches"
    return (
        f"{options.micro_batches} micro-batches, {options.mib} MiB a message and skip tensor, "
        f"forward {options.task_ms:.0f} ms, backward twice that"
    )


def _notes(options: argparse.Namespace) -> list[str]:
    notes = [
        f"measured here, median of {options.rounds} rounds; busy: share of time in tasks, mean of "
        "stages; MiB reserved: the most, by torch on GPUs, sum of stages",
        f"| published: U-Net (5, 64) on 4 GPUs, {TORCHGPIPE}; Dependency: ordered backward, "
        "Streams: transfers beside compute, Portals: direct skips",
    ]
    if not options.full:
        m, task_s = options.micro_batches, options.task_ms / 1e3
        plan = gpipe(m, NUM_STAGES, recompute=recomputed("except_last", m))
        costs = Costs.uniform(NUM_STAGES, forward_s=task_s, backward_s=2 * task_s)
        alone_ms = simulate(plan, costs).total_s * 1e3
        notes.append(f"tasks alone, if no transfer took any time: {alone_ms:.0f} ms (simulated)")
    return notes
