"""Whether a ResNet learns the same with and without the pipeline, on real images.

The published experiment trains ResNet-101 on ImageNet. Here a small ResNet classifies
scikit-learn's handwritten digits (or CIFAR-10, in its binary version in ``--cifar10 FOLDER``),
with the published optimizer and schedule over fewer epochs, from several seeds:

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.figures import ACCURACY
from benchmarks.report import Cell, Report, Table
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

_NUM_STAGES = 2
_NUM_CLASSES = 10
_LEARNING_RATE = 0.1

#: Bytes of one CIFAR-10 image: its class and 32 x 32 pixels of 3 colours.
_CIFAR10_BYTES = 1 + 3 * 32 * 32


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="ResNet-101, 256 images, 90 epochs")
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER", help="data_batch_1.bin and so on")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    sizes = {
        "full": options.full,
        "cifar10": None if options.cifar10 is None else str(options.cifar10.resolve()),
        "epochs": options.epochs or (90 if options.full else 8),
        "batch_size": options.batch_size or (256 if options.full else 64),
        "m": options.micro_batches,
    }
    figures = launch(
        "benchmarks.published.resnet_accuracy:measure", _NUM_STAGES, seeds=options.seeds, **sizes
    )
    return Report(
        "resnet_accuracy", [tabulate(figures, sizes)], figures, sizes | {"seeds": options.seeds}
    )


# -- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Images ``(number, 3, height, width)`` float, and their classes, to train and to test on."""

    images: Tensor
    classes: Tensor
    test_images: Tensor
    test_classes: Tensor


def _digits() -> Data:
    """Return scikit-learn's digits, 8 x 8, each pixel four by four times; every fifth to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)
    images = ((images - images.mean()) / images.std()).unsqueeze(1).repeat(1, 3, 1, 1)
    images = images.repeat_interleave(4, 2).repeat_interleave(4, 3)
    classes = torch.tensor(digits.target)
    is_test = torch.arange(len(images)) % 5 == 4
    return Data(images[~is_test], classes[~is_test], images[is_test], classes[is_test])


def read_cifar10(folder: Path) -> Data:
    """Read CIFAR-10's binary version.

    Raises:
        FileNotFoundError: the folder does not hold it.
    """
    train, test = sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin"
    if not train or not test.exists():
        raise FileNotFoundError(
            f"{folder} holds no data_batch_*.bin and test_batch.bin: give the folder of CIFAR-10's "
            "binary version (cifar-10-batches-bin)"
        )
    parts = []
    for paths in (train, [test]):
        raw = b"".join(path.read_bytes() for path in paths)
        rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, _CIFAR10_BYTES)
        images = rows[:, 1:].reshape(-1, 3, 32, 32).float()
        parts += [(images - 120.0) / 64.0, rows[:, 0].long()]  # about mean and deviation
    return Data(*parts)


# -- in the processes that are launched -----------------------------------------------------------


def measure(seeds: int, full: bool, cifar10: str | None, **sizes: Any) -> list[dict[str, Any]]:
    """Train every way from each seed; every rank calls it."""
    data = _digits() if cifar10 is None else read_cifar10(Path(cifar10))
    build = resnet101 if full else lambda classes: resnet(classes, (1, 1, 1, 1), 8)
    return [measure_seed(data, build, seed, **sizes) for seed in range(seeds)]


def measure_seed(
    data: Data,
    build: Callable[[int], nn.Sequential],
    seed: int,
    epochs: int,
    batch_size: int,
    m: int,
) -> dict[str, Any]:
    """Train every way from one seed.

    Returns:
        On every rank: ``errors``, by way the top-1 error in percent; ``difference``, the largest
        difference of a number in the pipeline's state from the state of *pieces*.
    """
    training = _Training(data, build, seed, epochs, batch_size, m)
    rank = dist.get_rank()
    # Rank 0 trains *whole* while rank 1 trains *pieces*.
    error, state = training.alone(m if rank == 1 else 1)
    alone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(alone, (error, state if rank == 1 else {}))
    pipeline_error, ours = training.pipelined(deferred=False)
    deferred_error, _ = training.pipelined(deferred=True)
    truth = alone[1][1]
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        differences,
        max(float((ours[name].double() - truth[name].double()).abs().max()) for name in ours),
    )
    errors = {WHOLE: alone[0][0], PIECES: alone[1][0]}
    errors |= {PIPELINE: pipeline_error, DEFERRED: deferred_error}
    return {"errors": errors, "difference": max(differences)}


@dataclass(frozen=True)
class _Training:
    """One training run, with or without pipeline: the same model, data, order and schedule."""

    data: Data
    build: Callable[[int], nn.Sequential]
    seed: int
    epochs: int
    batch_size: int
    m: int

    def alone(self, num_pieces: int) -> tuple[float, dict[str, Tensor]]:
        """Train in this process; returns the error in percent and the state."""
        device = _device()
        model = self._model().to(device)
        optimizer = self._optimizer(model)
        for images, classes in self._batches(optimizer):
            optimizer.zero_grad()
            pieces = zip(images.chunk(num_pieces), classes.chunk(num_pieces), strict=True)
            losses = [
                F.cross_entropy(model(x.to(device)), y.to(device)) * (len(x) / len(images))
                for x, y in pieces
            ]
            for loss in reversed(losses):
                loss.backward()
            optimizer.step()
        model.eval()
        return self._error(lambda images: model(images.to(device))), _state(model)

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
        optimizer = self._optimizer(stage)
        for images, classes in self._batches(optimizer):
            optimizer.zero_grad()
            stage.step(images, classes)
            optimizer.step()
        stage.eval()
        result = self._error(lambda images: stage.fetch(stage(images))), _state(stage)
        stage.close()
        return result

    def _model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return self.build(_NUM_CLASSES)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), _LEARNING_RATE, momentum=0.9, weight_decay=1e-4, nesterov=True
        )

    def _batches(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield whole mini-batches, and lower the learning rate as published: 30, 60, 80 of 90."""
        order = torch.Generator().manual_seed(self.seed)
        images, classes = self.data.images, self.data.classes
        for epoch in range(self.epochs):
            num_drops = sum(9 * epoch >= part * self.epochs for part in (3, 6, 8))
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * 0.1**num_drops
            for chosen in torch.randperm(len(images), generator=order).split(self.batch_size):
                if len(chosen) == self.batch_size:
                    yield images[chosen], classes[chosen]

    def _error(self, predict: Callable[[Tensor], Tensor]) -> float:
        num_wrong = 0
        with torch.no_grad():
            for images, classes in zip(
                self.data.test_images.split(self.batch_size),
                self.data.test_classes.split(self.batch_size),
                strict=True,
            ):
                num_wrong += int((predict(images).argmax(1).cpu() != classes).sum())
        return 100 * num_wrong / len(self.data.test_classes)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")


# -- the table ------------------------------------------------------------------------------------


def tabulate(figures: list[dict[str, Any]], sizes: dict[str, Any]) -> Table:
    """Lay out errors, mean and deviation over seeds, beside the published errors."""
    published = ACCURACY[256]
    beside = {WHOLE: published.data_parallel, PIPELINE: published.torchgpipe}
    whole = [figure["errors"][WHOLE] for figure in figures]
    rows: list[list[Cell]] = []
    for way, words in _WORDS.items():
        errors = [figure["errors"][way] for figure in figures]
        gaps = [error - base for error, base in zip(errors, whole, strict=True)]
        rows.append([words, _spread(errors), None if way == WHOLE else _spread(gaps, "+")])
        rows[-1].append(_written(beside.get(way)))
    model = "ResNet-101" if sizes["full"] else "ResNet of 4 bottleneck blocks"
    images = "scikit-learn's digits" if sizes["cifar10"] is None else "CIFAR-10"
    return Table(
        f"resnet_accuracy: {model}, {images}, {sizes['epochs']} epochs, {sizes['batch_size']} "
        f"samples a mini-batch in {sizes['m']} micro-batches, {len(figures)} seeds",
        ["", "top-1 error %", "above whole mini-batches", "| published"],
        rows,
        ["s", "s", "s"],
        [
            "largest difference of a number in the trained model, pipeline to the same "
            f"micro-batches in one process: {max(f['difference'] for f in figures):g}",
            "| published: ResNet-101 on ImageNet, 256 images a mini-batch: torchgpipe 0.0.3 on 2 "
            "Tesla P40 GPUs, and nn.DataParallel; "
            f"Goyal et al.: {_written(published.goyal)}",
        ],
    )


def _spread(values: list[float], sign: str = "") -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.2f}±{deviation:.2f}"


def _written(figure: tuple[float, float] | None) -> Cell:
    return None if figure is None else f"{figure[0]:.2f}±{figure[1]:.2f}"
