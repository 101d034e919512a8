"""The published experiments of torchgpipe and GPipe, repeated: speed, memory, accuracy.

    speed       U-Net, AmoebaNet-D and ResNet-101 on 1, 2, 4 and 8 devices
    memory      how large a U-Net or an AmoebaNet-D as many devices hold
    accuracy    whether a ResNet learns the same with and without the pipeline

On CPUs each is scaled down to what two cores do in minutes; ``--device cuda`` takes the published
sizes, mini-batches and balances, on as many GPUs as there are stages. Published figures are in
``published_sizes.py``, and stand beside what is measured here.
"""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import published_accuracy
from benchmarks.memory import counted_memory, reset_peak
from benchmarks.peers.ours import stage_of
from benchmarks.published_sizes import BASELINE, EXPERIMENTS, Experiment, Memory, Speed
from benchmarks.report import Cell, Report, Table
from benchmarks.rounds import Step, Times, launch, measure, ratio
from benchmarks.workloads import Job, Workload
from procpipe import Stage
from procpipe.balance import balance_by_size

DEVICES = ("cpu", "cuda")

MEASURES = ("speed", "memory", "accuracy")

_SOURCE = "torchgpipe 0.0.5 on Tesla P40 GPUs (its documentation's page Benchmarks)"

_MIB = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 4, 8), default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, help="of the runs to compare accuracy")


def run(options: argparse.Namespace) -> Report:
    tables: list[Table] = []
    figures: dict[str, Any] = {}
    for name in options.experiments:
        if "speed" in options.measure:
            table, figures[f"{name}, speed"] = _speed(name, options)
            tables.append(table)
        if "memory" in options.measure and EXPERIMENTS[name].memory:
            table, figures[f"{name}, memory"] = _memory(name, options)
            tables.append(table)
    if "accuracy" in options.measure:
        table, figures["accuracy"] = published_accuracy.measured(options)
        tables.append(table)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    return Report("published", tables, figures, settings)


def _why_not(num_stages: int, options: argparse.Namespace) -> str | None:
    num_gpus = torch.cuda.device_count()
    return "too few GPUs" if options.device == "cuda" and num_stages > num_gpus else None


# -- speed ----------------------------------------------------------------------------------------


def scaled(experiment: Experiment, row: Speed, *, is_full: bool) -> tuple[int, int]:
    """Return the number of micro-batches of a row, and their samples."""
    if is_full:
        return row.num_micro_batches, row.micro_batch
    # The baseline has so many micro-batches that an optimizer's step counts little.
    m = 8 if row.name == BASELINE else min(row.num_micro_batches, experiment.max_micro_batches)
    return m, experiment.micro_batch


def job_of(name: str, row: Speed, device: str, *, is_full: bool) -> Job:
    """Return a row as a job; a published balance is of the published size only."""
    experiment = EXPERIMENTS[name]
    m, samples = scaled(experiment, row, is_full=is_full)
    place = 0 if is_full else 1
    pixels = experiment.pixels[place]
    workload = Workload(
        name,
        "",
        "",
        partial(experiment.build, *experiment.size[place]),
        (samples, 3, pixels, pixels),
        experiment.target_shape(samples, pixels),
        experiment.loss_fn,
        num_classes=experiment.num_classes,
        is_even=False,
    )
    balances = {row.num_stages: list(row.balance)} if is_full and row.balance else {}
    return Job(workload, row.num_stages, m, device, balances=balances)


def _speed(name: str, options: argparse.Namespace) -> tuple[Table, dict[str, Times]]:
    """Measure rows with equal numbers of stages in one launch; at full size each alone."""
    experiment, is_full = EXPERIMENTS[name], options.sizes == "full"
    baseline, *others = experiment.speed
    rows = [row for row in others if row.num_stages in options.stages]
    to_run = [row for row in rows if _why_not(row.num_stages, options) is None]

    def times_of(num_stages: int, *names: str) -> Times:
        times: Times = launch(
            "benchmarks.published:measure_speed",
            num_stages,
            device=options.device,
            name=name,
            rows=names,
            is_full=is_full,
            num_rounds=options.rounds,
        )
        return times

    figures: dict[str, Times] = {}
    alone = times_of(1, BASELINE) if is_full and to_run else None
    for n, of_stages in groupby(to_run, key=lambda row: row.num_stages):
        print(f"published: {name} on {n} stages", flush=True)
        names = [row.name for row in of_stages]
        together = None if alone else times_of(n, BASELINE, *names)
        for each in names:
            times = together or (alone or {}) | times_of(n, each)
            figures[each] = {BASELINE: times[BASELINE], each: times[each]}
    return tabulate_speed(experiment, [baseline, *rows], figures, is_full=is_full), figures


def measure_speed(name: str, rows: list[str], is_full: bool, num_rounds: int) -> Times:
    """Measure rows of an experiment, each in its turn; every rank calls it.

    A step is a mini-batch forward and backward, and a step of SGD, as published.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = {}
    for row in EXPERIMENTS[name].speed:
        if row.name in rows:
            job = job_of(name, row, device, is_full=is_full)
            steps[row.name] = (_baseline if row.name == BASELINE else _pipeline)(job)
    return measure(steps, num_rounds=num_rounds, num_steps=1)


def _pipeline(job: Job) -> Step:
    # Without a second micro-batch there is none that "except_last" recomputes.
    stage = stage_of(job, "always" if job.num_micro_batches == 1 else "except_last")
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)

    def step() -> None:
        stage.step(job.input, job.target)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _baseline(job: Job) -> Step:
    """Train in plain PyTorch on rank 0, one micro-batch after the other."""
    if dist.get_rank() != 0:
        return lambda: None
    model, m = job.model().to(job.own_device), job.num_micro_batches
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        for x, y in job.micro_batches():
            (job.workload.loss_fn(model(x), y) / m).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed_ups(
    experiment: Experiment, figures: dict[str, Times], *, is_full: bool
) -> dict[str, float]:
    """Return each row's measured speed-up over one device, sample by sample, round by round."""

    def batch(row: Speed) -> int:
        m, samples = scaled(experiment, row, is_full=is_full)
        return m * samples

    baseline = experiment.speed[0]
    return {
        row.name: ratio(figures[row.name][BASELINE], figures[row.name][row.name])
        * (batch(row) / batch(baseline))
        for row in experiment.speed
        if row.name in figures
    }


def tabulate_speed(
    experiment: Experiment, rows: list[Speed], figures: dict[str, Times], *, is_full: bool
) -> Table:
    """Lay out measured and published speed-ups over the first row that was published."""
    reference = next(row for row in experiment.speed if row.samples_per_s)
    found = {BASELINE: 1.0} | speed_ups(experiment, figures, is_full=is_full)
    cells: list[list[Cell]] = []
    for row in rows:
        m, samples = scaled(experiment, row, is_full=is_full)
        times = figures.get(row.name, {}).get(row.name)
        speed_up = found.get(row.name) if figures else None
        relative = speed_up and reference.name in found and speed_up / found[reference.name]
        is_crowded = not is_full and row.num_stages > (os.cpu_count() or 1)
        n = row.num_stages
        cells.append(
            [
                row.name,
                m,
                m * samples,
                m * samples / statistics.median(times) if times else None,
                f"{relative:.2f}{'*' * is_crowded}" if relative else None,
                n * m / (m + n - 1),
                row.samples_per_s / reference.samples_per_s if row.samples_per_s else None,
                row.huang,
            ]
        )
    place = 0 if is_full else 1
    size, pixels = experiment.size[place], experiment.pixels[place]
    headings = ["", "m", "samples a step", "samples/s", "speed-up", "ideal", "published"]
    return Table(
        f"speed: {experiment.model} {size or ''}, images of {pixels} x {pixels}; published: "
        f"{experiment.size[0] or ''}, {experiment.pixels[0]} x {experiment.pixels[0]}",
        [*headings, "Huang et al."],
        cells,
        ["d", "d", ".2f", "s", ".2f", ".2f", ".2f"],
        [
            f"speed-ups over {reference.name}, medians of rounds; ideal: n m / (m + n - 1), over "
            "one device, without recomputation",
            "all pipelines recompute, as published, and the baseline does not",
            f"published: {_SOURCE}",
            f"* more stages than this machine's {os.cpu_count()} cores, which they share",
            *(f"not run: {row.name}" for row in rows[1:] if row.name not in figures),
        ],
    )


# -- memory ---------------------------------------------------------------------------------------


def _memory(name: str, options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    experiment, is_full = EXPERIMENTS[name], options.sizes == "full"
    figures: dict[str, Any] = {}
    for row in experiment.memory:
        if row.num_stages not in options.stages:
            continue
        print(f"published: memory of {name}, {row.name}", flush=True)
        figures[row.name] = None
        if _why_not(row.num_stages, options) is None:
            figures[row.name] = launch(
                "benchmarks.published:measure_memory",
                row.num_stages,
                device=options.device,
                name=name,
                row=row.name,
                is_full=is_full,
            )
    return tabulate_memory(experiment, figures, is_full=is_full), figures


def measure_memory(name: str, row: str, is_full: bool) -> list[dict[str, int]]:
    """Take two training steps; every rank calls it.

    Returns:
        Of each stage, on rank 0: ``parameters``, a number; ``bytes``, by how much its memory grew.
    """
    experiment = EXPERIMENTS[name]
    of_row = next(each for each in experiment.memory if each.name == row)
    is_on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_rank()) if is_on_gpu else torch.device("cpu")
    _load_code(experiment)
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    reset_peak()
    start_bytes = counted_memory()["VmRSS"]
    stage = _model_of(experiment, of_row, device, is_full=is_full)
    _train(experiment, stage, device, is_full=is_full)
    grown = counted_memory()["VmHWM"] - start_bytes
    ours = {
        "parameters": sum(p.numel() for p in stage.parameters()),
        "bytes": torch.cuda.max_memory_reserved(device) if is_on_gpu else grown,
    }
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, ours)
    return of_all


def _model_of(
    experiment: Experiment, row: Memory, device: torch.device, *, is_full: bool
) -> nn.Module:
    if row.name == BASELINE:
        return experiment.build(*(row.size if is_full else row.small)).to(device)
    with torch.device("meta"):
        model = experiment.build(*(row.size if is_full else row.small))
        batch, pixels = experiment.batch[1], experiment.pixels[1]
        images = torch.empty(batch, 3, pixels, pixels)
    balance = list(row.balance)
    if not is_full:
        scale = experiment.param_scale
        balance = balance_by_size(row.num_stages, model, images, chunks=batch, param_scale=scale)
    chunks = row.num_micro_batches if is_full else batch
    return Stage(model, balance, chunks=chunks, loss_fn=experiment.loss_fn)


def _train(
    experiment: Experiment, stage: nn.Module, device: torch.device, *, is_full: bool
) -> None:
    place = 0 if is_full else 1
    batch, pixels = experiment.batch[place], experiment.pixels[place]
    input = torch.rand(batch, 3, pixels, pixels, device=device)
    target: Tensor = torch.rand(experiment.target_shape(batch, pixels), device=device)
    if experiment.num_classes:
        target = (target * experiment.num_classes).long()
    optimizer = experiment.optimizer(stage.parameters(), 1e-3)
    for _ in range(2):
        if isinstance(stage, Stage):
            stage.step(input, target)
        else:
            experiment.loss_fn(stage(input), target).backward()
        optimizer.step()


def _load_code(experiment: Experiment) -> None:
    """Load and compile what a first training step needs, before memory is measured."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    experiment.optimizer(model.parameters(), 1e-3).step()


def tabulate_memory(experiment: Experiment, figures: dict[str, Any], *, is_full: bool) -> Table:
    """Lay out what was measured, and beside it what is counted and published of the full size."""
    cells: list[list[Cell]] = []
    for row in experiment.memory:
        if row.name not in figures:
            continue
        stages = figures[row.name]
        sizes = [stage["bytes"] / _MIB for stage in stages or ()]
        cells.append(
            [
                row.name,
                str(row.size if is_full else row.small),
                sum(stage["parameters"] for stage in stages) / 1e6 if stages else None,
                max(sizes, default=None),
                sum(sizes) if stages else None,
                str(row.size),
                row.num_parameters / 1e6,
                row.gib,
                row.huang_gb,
            ]
        )
    place = 0 if is_full else 1
    batch, pixels = experiment.batch[place], experiment.pixels[place]
    measured = ["", "size", "M parameters", "largest stage MiB", "all stages MiB"]
    published = ["| published size", "M parameters", "GiB of all devices"]
    return Table(
        f"memory: {experiment.model}, {batch} images of {pixels} x {pixels}; published: "
        f"{experiment.batch[0]} of {experiment.pixels[0]} x {experiment.pixels[0]}",
        [*measured, *published, "Huang et al. GB"],
        cells,
        ["s", ".1f", ".0f", ".0f", "s", ".1f", ".1f", ".2f"],
        [
            "MiB: by how much the processes' resident memory grew (on GPUs: what torch reserved)",
            "the baseline is one process without pipeline and recomputation; pipelines recompute",
            f"published: {_SOURCE}; Huang et al.: peak activations, on TPUs",
        ],
    )
