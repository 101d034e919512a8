"""What the launched processes of an experiment of speed run: steps, timed in turns.

A step is a mini-batch forward and backward, and a step of SGD, as published.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.published.experiment import BASELINE, Experiment, Scale, Setting
from benchmarks.rounds import Step, Times, measure
from procpipe import Stage

_LEARNING_RATE = 0.1


def measure_settings(
    part: str, scale: dict[str, Any], settings: list[dict[str, Any]], num_rounds: int
) -> Times:
    """Measure settings of an experiment, each in its turn; every rank calls it."""
    experiment: Experiment = importlib.import_module(f"benchmarks.published.{part}").EXPERIMENT
    steps = {}
    for fields in settings:
        setting = Setting(**fields)
        make = _baseline_step if setting.name == BASELINE else _pipeline_step
        steps[setting.name] = make(experiment, Scale(**scale), setting)
    return measure(steps, num_rounds=num_rounds, num_steps=1)


def _pipeline_step(experiment: Experiment, scale: Scale, setting: Setting) -> Step:
    stage = Stage(
        experiment.model_at(scale),
        setting.balance,
        chunks=setting.num_micro_batches,
        checkpoint=setting.checkpoint,
        loss_fn=experiment.loss_fn,
    )
    optimizer = torch.optim.SGD(stage.parameters(), _LEARNING_RATE)
    input, target = experiment.mini_batch(scale, setting.batch_size, stage.device)

    def step() -> None:
        stage.step(input, target)
        optimizer.step()
        optimizer.zero_grad()
        _wait_device(stage.device)

    return step


def _baseline_step(experiment: Experiment, scale: Scale, setting: Setting) -> Step:
    """Train in plain PyTorch on rank 0, one micro-batch after the other."""
    if dist.get_rank() != 0:
        return lambda: None
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = experiment.model_at(scale).to(device)
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
    input, target = experiment.mini_batch(scale, setting.batch_size, device)
    m = setting.num_micro_batches
    micro_batches = list(zip(input.chunk(m), target.chunk(m), strict=True))

    def step() -> None:
        for x, y in micro_batches:
            (experiment.loss_fn(model(x), y) / m).backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait_device(device)

    return step


def _wait_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
