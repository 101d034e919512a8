"""Whether a ResNet learns the same with and without the pipeline, on real images.

The published experiment trains ResNet-101 on ImageNet. Here a small ResNet, or ResNet-101 on GPUs,
classifies scikit-learn's handwritten digits, with the published optimizer and schedule over fewer
epochs, from several seeds:

    whole          one process, whole mini-batches: training without a pipeline
    pieces         one process, the pipeline's micro-batches in the pipeline's order
    pipeline       2 stages, as published: batch normalisation by micro-batch
    deferred       2 stages, deferred_batch_norm=True

A pipeline should compute what *pieces* computes, to the last digit. It differs from *whole* in
batch normalisation, which normalises each micro-batch by itself.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published_sizes import ERROR_OF_TORCHGPIPE, ERROR_WITHOUT
from benchmarks.report import Cell, Table
from benchmarks.rounds import launch
from examples.models.resnet import resnet, resnet101
from procpipe import Stage

WHOLE, PIECES, PIPELINE, DEFERRED = "whole", "pieces", "pipeline", "deferred"

_WORDS = {
    WHOLE: "one process, whole mini-batches",
    PIECES: "one process, micro-batches",
    PIPELINE: "pipeline of 2",
    DEFERRED: "pipeline of 2, deferred_batch_norm",
}

_NUM_STAGES, _NUM_CLASSES, _LEARNING_RATE = 2, 10, 0.1


def measured(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """Train every way from each seed."""
    is_full = options.sizes == "full"
    settings: dict[str, Any] = {"epochs": 90 if is_full else 8, "m": 4}
    settings["batch_size"] = 256 if is_full else 64
    figures = launch(
        "benchmarks.published_accuracy:measure",
        _NUM_STAGES,
        device=options.device,
        seeds=options.seeds,
        is_full=is_full,
        **settings,
    )
    return tabulate(figures, is_full=is_full, **settings), figures


# -- in the processes that are launched -----------------------------------------------------------


def measure(
    seeds: int, is_full: bool, epochs: int, batch_size: int, m: int
) -> list[dict[str, Any]]:
    """Train every way from each seed; every rank calls it."""
    build = resnet101 if is_full else partial(resnet, num_blocks=(1, 1, 1, 1), base_channels=8)
    return [
        measure_seed(Training(*digits(), build, seed, epochs, batch_size, m))
        for seed in range(seeds)
    ]


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: images of 8 x 8, each pixel four by four times, and classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)
    images = ((images - images.mean()) / images.std()).unsqueeze(1).repeat(1, 3, 1, 1)
    return images.repeat_interleave(4, 2).repeat_interleave(4, 3), torch.tensor(found.target)


def measure_seed(training: Training) -> dict[str, Any]:
    """Train every way from one seed.

    Returns:
        On every rank: ``errors``, by way the top-1 error in percent; ``difference``, the largest
        difference of a number in the pipeline's state from the state of *pieces*.
    """
    # Rank 0 trains *whole* while rank 1 trains *pieces*.
    is_second = dist.get_rank() == 1
    error, state = training.alone(training.m if is_second else 1)
    (whole, _), (pieces, truth) = _gathered((error, state if is_second else {}))
    pipeline, ours = training.pipelined(deferred=False)
    deferred, _ = training.pipelined(deferred=True)
    largest = max(float((ours[name].double() - truth[name].double()).abs().max()) for name in ours)
    errors = {WHOLE: whole, PIECES: pieces, PIPELINE: pipeline, DEFERRED: deferred}
    return {"errors": errors, "difference": max(_gathered(largest))}


def _gathered(ours: Any) -> list[Any]:
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, ours)
    return of_all


@dataclass(frozen=True)
class Training:
    """One training run, with or without pipeline: the same model, data, order and schedule.

    Every fifth image is for the test.
    """

    images: Tensor
    classes: Tensor
    build: Callable[..., nn.Sequential]
    seed: int
    epochs: int
    batch_size: int
    m: int

    def alone(self, num_pieces: int) -> tuple[float, dict[str, Tensor]]:
        """Train in this process; returns the error in percent and the state."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = self._model().to(device)

        def step(images: Tensor, classes: Tensor) -> None:
            pieces = zip(images.chunk(num_pieces), classes.chunk(num_pieces), strict=True)
            losses = [
                F.cross_entropy(model(x.to(device)), y.to(device)) * (len(x) / len(images))
                for x, y in pieces
            ]
            for loss in reversed(losses):
                loss.backward()

        return self._train(model, step, lambda images: model(images.to(device)))

    def pipelined(self, *, deferred: bool) -> tuple[float, dict[str, Tensor]]:
        """Train as a pipeline; returns the error in percent and this stage's state."""
        model = self._model()
        half = len(model) // 2
        stage = Stage(
            model,
            [half, len(model) - half],
            chunks=self.m,
            deferred_batch_norm=deferred,
            loss_fn=F.cross_entropy,
        )
        result = self._train(stage, stage.step, lambda images: stage.fetch(stage(images)))
        stage.close()
        return result

    def _model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return self.build(num_classes=_NUM_CLASSES)

    def _train(
        self,
        model: nn.Module,
        step: Callable[[Tensor, Tensor], object],
        predict: Callable[[Tensor], Tensor],
    ) -> tuple[float, dict[str, Tensor]]:
        """Train as published: the learning rate falls after epochs 30, 60 and 80 of 90."""
        optimizer = torch.optim.SGD(
            model.parameters(), _LEARNING_RATE, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        order = torch.Generator().manual_seed(self.seed)
        is_test = torch.arange(len(self.images)) % 5 == 4
        images, classes = self.images[~is_test], self.classes[~is_test]
        for epoch in range(self.epochs):
            num_drops = sum(9 * epoch >= part * self.epochs for part in (3, 6, 8))
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * 0.1**num_drops
            for chosen in torch.randperm(len(images), generator=order).split(self.batch_size):
                if len(chosen) == self.batch_size:
                    optimizer.zero_grad()
                    step(images[chosen], classes[chosen])
                    optimizer.step()
        model.eval()
        with torch.no_grad():
            guesses = [
                predict(part).argmax(1).cpu()
                for part in self.images[is_test].split(self.batch_size)
            ]
        is_wrong = torch.cat(guesses) != self.classes[is_test]
        state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        return 100 * float(is_wrong.double().mean()), state


# -- the table ------------------------------------------------------------------------------------


def tabulate(
    figures: list[dict[str, Any]], *, is_full: bool, epochs: int, batch_size: int, m: int
) -> Table:
    """Lay out errors, mean and deviation over seeds, beside the published errors."""
    beside = {WHOLE: ERROR_WITHOUT, PIPELINE: ERROR_OF_TORCHGPIPE}
    whole = [figure["errors"][WHOLE] for figure in figures]
    rows: list[list[Cell]] = []
    for way, words in _WORDS.items():
        errors = [figure["errors"][way] for figure in figures]
        gaps = [error - base for error, base in zip(errors, whole, strict=True)]
        rows.append([words, _spread(errors), None if way == WHOLE else _spread(gaps, "+")])
        rows[-1].append(beside.get(way))
    model = "ResNet-101" if is_full else "ResNet of 4 bottleneck blocks"
    return Table(
        f"accuracy: {model}, scikit-learn's digits, {epochs} epochs, {batch_size} samples a "
        f"mini-batch in {m} micro-batches, {len(figures)} seeds",
        ["", "top-1 error %", "above whole mini-batches", "| published"],
        rows,
        ["s", "s", "s"],
        [
            "largest difference of a number in the trained model, pipeline to the same "
            f"micro-batches in one process: {max(f['difference'] for f in figures):g}",
            "| published: ResNet-101 on ImageNet, 256 images a mini-batch: torchgpipe 0.0.3 on 2 "
            "Tesla P40 GPUs, and nn.DataParallel",
        ],
    )


def _spread(values: list[float], sign: str = "") -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.2f}±{deviation:.2f}"
