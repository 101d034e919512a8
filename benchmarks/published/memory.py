"""What the experiments of memory have in common: a model for each number of devices, and its bytes.

The published point: with n devices a model of about n times the size can be trained, in the same
memory a device. On GPUs the memory is that of torch's allocator; on CPUs it is the growth of a
process's resident memory, from before the model is built to its peak in two training steps.

Published sizes are counted, not measured: parameters on the meta device, to the last one; bytes by
``procpipe.balance.profile_layers``.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.memory import counted_memory, reset_peak
from benchmarks.published.experiment import BASELINE
from benchmarks.published.figures import TORCHGPIPE, Memory
from benchmarks.report import Cell, Report, Table
from benchmarks.rounds import launch
from procpipe import Stage
from procpipe.balance import balance_by_size, profile_layers

MIB, GIB = 1 << 20, 1 << 30

_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        name: as published.
        size: of the model.
        num_stages: devices, one a stage.
        num_micro_batches: in a mini-batch.
        balance: number of layers in each stage; empty to have it found by size.
    """

    name: str
    size: tuple[int, int]
    num_stages: int
    num_micro_batches: int
    balance: tuple[int, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """A published experiment of memory.

    Attributes:
        part: the name of its module.
        model: the name of the model and of its sizes.
        build: builds it from a setting's size.
        target: ``(batch_size, image_size) -> target``.
        loss_fn: ``(output, target) -> 0-dim loss``.
        optimizer: makes it from parameters and a learning rate.
        param_scale: bytes that training holds for each byte of parameters.
        settings: as published; the first is one device without a pipeline.
        batch_size: samples in a mini-batch, as published.
        image_size: height and width of the images, as published.
        small_sizes: of the model in each setting, for two cores.
        small_batch_size: samples in a mini-batch, for two cores.
        small_image_size: height and width of the images, for two cores.
        figures: the published figures of each setting.
    """

    part: str
    model: str
    build: Callable[..., nn.Sequential]
    target: Callable[[int, int], Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    param_scale: int
    settings: tuple[Setting, ...]
    batch_size: int
    image_size: int
    small_sizes: tuple[tuple[int, int], ...]
    small_batch_size: int
    small_image_size: int
    figures: Mapping[str, Memory]

    def meta_model(self, size: Sequence[int]) -> nn.Sequential:
        """Build the model without memory."""
        with torch.device("meta"):
            return self.build(*size)

    def meta_input(self, batch_size: int, image_size: int) -> Tensor:
        """Make a mini-batch's input without memory."""
        return torch.empty(batch_size, 3, image_size, image_size, device="meta")


@dataclass(frozen=True)
class Row:
    """The results of one setting.

    Attributes:
        setting: as it was run.
        stages: of each stage, what ``measure`` returned; None if there are too few GPUs.
        published_parameters: of the published size, counted.
        published_bytes: that training at the published size holds, counted.
    """

    setting: Setting
    stages: Sequence[Mapping[str, int]] | None
    published_parameters: int
    published_bytes: int

    def total(self, what: str) -> int:
        """Return a sum over stages."""
        assert self.stages is not None, "only what was run can be summed up"
        return sum(stage[what] for stage in self.stages)


def configure(parser: argparse.ArgumentParser, experiment: Experiment) -> None:
    names = [setting.name for setting in experiment.settings]
    parser.add_argument("--full", action="store_true", help="the published sizes, on GPUs")
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--image-size", type=int, help=f"by default {experiment.small_image_size}")
    parser.add_argument(
        "--batch-size", type=int, help=f"samples, by default {experiment.small_batch_size}"
    )


def run(options: argparse.Namespace, experiment: Experiment) -> Report:
    full = options.full
    batch_size = options.batch_size or (
        experiment.batch_size if full else experiment.small_batch_size
    )
    image_size = options.image_size or (
        experiment.image_size if full else experiment.small_image_size
    )
    rows = []
    for setting, size in zip(experiment.settings, experiment.small_sizes, strict=True):
        if setting.name not in options.settings:
            continue
        print(f"{experiment.part}: {setting.name}", flush=True)
        counted = _counted(experiment, setting)
        if not full:
            setting = _scaled(experiment, setting, size, batch_size, image_size)
        stages = None
        if not full or setting.num_stages <= torch.cuda.device_count():
            stages = launch(
                "benchmarks.published.memory:measure",
                setting.num_stages,
                part=experiment.part,
                setting=asdict(setting),
                batch_size=batch_size,
                image_size=image_size,
            )
        rows.append(Row(setting, stages, *counted))
    return Report(
        experiment.part,
        tabulate(experiment, rows, batch_size, image_size),
        [asdict(row) for row in rows],
        {"full": full, "batch_size": batch_size, "image_size": image_size},
    )


def _counted(experiment: Experiment, setting: Setting) -> tuple[int, int]:
    """Count parameters, and bytes, of a published size."""
    model = experiment.meta_model(setting.size)
    batch = 1 if setting.name != BASELINE else experiment.batch_size
    table = profile_layers(
        model, experiment.meta_input(batch, experiment.image_size), flops_per_s=1.0
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    of_parameters = sum(p.nbytes for layer in model for p in layer.parameters())
    held = sum(layer.held_bytes for layer in table.layers)
    return num_parameters, int(held + experiment.param_scale * of_parameters)


def _scaled(
    experiment: Experiment, setting: Setting, size: tuple[int, int], batch_size: int, side: int
) -> Setting:
    """Scale a published setting to micro-batches of one sample, with a balance found by size."""
    setting = replace(setting, size=size, num_micro_batches=batch_size, balance=())
    if setting.name == BASELINE:
        return setting
    balance = balance_by_size(
        setting.num_stages,
        experiment.meta_model(size),
        experiment.meta_input(batch_size, side),
        chunks=batch_size,
        param_scale=experiment.param_scale,
    )
    return replace(setting, balance=tuple(balance))


# -- in the processes that are launched -----------------------------------------------------------


def measure(
    part: str, setting: dict[str, Any], batch_size: int, image_size: int
) -> list[dict[str, int]]:
    """Take two training steps; every rank calls it.

    Returns:
        Of each stage, on rank 0: ``parameters``, a number; ``bytes``, by how much its memory grew.
    """
    experiment: Experiment = importlib.import_module(f"benchmarks.published.{part}").EXPERIMENT
    of_setting = Setting(**setting)
    local_rank = dist.get_rank()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    _load_code(experiment)
    memory = _Memory(device)
    if of_setting.name == BASELINE:
        stage: nn.Module = experiment.build(*of_setting.size).to(device)
    else:
        stage = Stage(
            experiment.meta_model(of_setting.size),
            of_setting.balance,
            chunks=of_setting.num_micro_batches,
            loss_fn=experiment.loss_fn,
        )
    _train(experiment, stage, batch_size, image_size, device)
    ours = {
        "parameters": sum(p.numel() for p in stage.parameters()),
        "bytes": memory.growth_bytes(),
    }
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, ours)
    return of_all


def _train(
    experiment: Experiment, stage: nn.Module, batch_size: int, image_size: int, device: torch.device
) -> None:
    input = torch.rand(batch_size, 3, image_size, image_size, device=device)
    target = experiment.target(batch_size, image_size).to(device)
    optimizer = experiment.optimizer(stage.parameters(), _LEARNING_RATE)
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
    experiment.optimizer(model.parameters(), _LEARNING_RATE).step()


class _Memory:
    """The growth of this process's memory on its device, from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            reset_peak()
            self._start_bytes = counted_memory()["VmRSS"]

    def growth_bytes(self) -> int:
        """Return the growth at the peak."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return counted_memory()["VmHWM"] - self._start_bytes


# -- the tables -----------------------------------------------------------------------------------


def tabulate(
    experiment: Experiment, rows: Sequence[Row], batch_size: int, image_size: int
) -> list[Table]:
    """Lay out the measurements, and the counted and published memory of the published sizes."""
    published = f"{experiment.part}, published: {experiment.model}, {experiment.batch_size} images"
    return [
        _measured_table(
            f"{experiment.part}: {experiment.model}, {batch_size} images of {image_size} x "
            f"{image_size}",
            rows,
            experiment.param_scale,
        ),
        _published_table(
            f"{published} of {experiment.image_size} x {experiment.image_size}",
            rows,
            experiment.figures,
        ),
    ]


def _measured_table(title: str, rows: Sequence[Row], param_scale: int) -> Table:
    cells: list[list[Cell]] = []
    for row in rows:
        cells.append([row.setting.name, _words(row.setting.size)])
        if row.stages is None:
            cells[-1] += [None] * 4
            continue
        num_parameters, num_bytes = row.total("parameters"), row.total("bytes")
        largest_bytes = max(stage["bytes"] for stage in row.stages)
        activation_bytes = num_bytes - 4 * param_scale * num_parameters
        cells[-1] += [num_parameters / 1e6]
        cells[-1] += [size / MIB for size in (largest_bytes, num_bytes, activation_bytes)]
    grew = "by how much the processes' resident memory grew; shared memory counts at both ends"
    if torch.cuda.is_available():
        grew = "the most that torch reserved"
    notes = [
        f"measured here: {grew}",
        "the baseline is one process without pipeline and recomputation; the pipelines recompute",
        f"activations: all but parameters, gradients and the optimizer's, {param_scale} times the "
        "parameters",
    ]
    notes += [f"not run: {row.setting.name}: too few GPUs" for row in rows if row.stages is None]
    headings = [
        "",
        "size",
        "M parameters",
        "largest stage MiB",
        "all stages MiB",
        "activations MiB",
    ]
    return Table(title, headings, cells, ["s", ".1f", ".0f", ".0f", ".0f"], notes)


def _published_table(title: str, rows: Sequence[Row], figures: Mapping[str, Memory]) -> Table:
    has_parts = any(figure.activation_gib is not None for figure in figures.values())
    cells: list[list[Cell]] = []
    for row in rows:
        figure = figures[row.setting.name]
        cells.append([row.setting.name, _words(figure.size)])
        cells[-1] += [row.published_parameters / 1e6, figure.num_parameters / 1e6]
        cells[-1] += [row.published_bytes / GIB, figure.total_gib]
        cells[-1] += [figure.activation_gib, figure.huang_activation_gb] if has_parts else []
    notes = [
        "counted, on the meta device: parameters to the last one; bytes of parameters, gradients, "
        "the optimizer's and one micro-batch's activations (the baseline's: the mini-batch's)",
        f"published: {TORCHGPIPE}",
    ]
    headings = ["", "size", "M parameters counted", "published", "GiB counted", "published"]
    formats = ["s", ".1f", ".1f", ".1f", ".1f"]
    if has_parts:
        headings += ["activations GiB", "Huang et al. GB"]
        formats += [".2f", ".2f"]
        notes.append("activations: of all memory, as published; Huang et al.: the same, theirs")
    return Table(title, headings, cells, formats, notes)


def _words(size: Sequence[int]) -> str:
    return f"({', '.join(map(str, size))})"
