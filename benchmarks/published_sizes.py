"""The published experiments of torchgpipe and GPipe: their sizes, and the figures beside them.

Sources:

torchgpipe      its documentation's page "Benchmarks", for torchgpipe 0.0.5, Python 3.6.9,
                PyTorch 1.3.0, CUDA 10.1 and Tesla P40 GPUs of 24 GB (accuracy: 0.0.3 and PyTorch
                1.2.0): https://github.com/kakaobrain/torchgpipe/blob/fe52c4d/docs/benchmarks.rst
                and the scripts in benchmarks/ there, for sizes and balances. Described in Kim et
                al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models"
                (2020), https://arxiv.org/abs/2004.09910.
Huang et al.    "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
                (2019), https://arxiv.org/abs/1811.06965, on Cloud TPUs; as quoted on that page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.amoebanet import amoebanetd
from examples.models.resnet import resnet101
from examples.models.unet import unet

BASELINE = "baseline"


@dataclass(frozen=True)
class Speed:
    """A row of a table of speed.

    Attributes:
        name: as published; the baseline is one device without a pipeline.
        num_stages: devices, one a stage.
        num_micro_batches: in a mini-batch.
        micro_batch: samples in a micro-batch.
        balance: number of layers in each stage.
        samples_per_s: torchgpipe's throughput; 0 where none was published.
        huang: speed-up of Huang et al. over the first published row.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    micro_batch: int
    balance: tuple[int, ...] = ()
    samples_per_s: float = 0.0
    huang: float | None = None


@dataclass(frozen=True)
class Memory:
    """A row of a table of memory, summed over all devices.

    Attributes:
        name: as published.
        num_stages: devices, one a stage.
        num_micro_batches: in a mini-batch.
        size: of the model.
        small: of the model, for two cores.
        balance: number of layers in each stage.
        num_parameters: torchgpipe's.
        gib: all memory that torchgpipe used; None where it ran out of it.
        huang_gb: peak activation memory of Huang et al., in GB.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    size: tuple[int, int]
    small: tuple[int, int]
    balance: tuple[int, ...]
    num_parameters: float
    gib: float | None
    huang_gb: float | None = None


@dataclass(frozen=True)
class Experiment:
    """A model, with its published rows.

    Attributes:
        model: the name of the model and of its sizes.
        build: builds it from a size.
        num_classes: of its targets; 0 for a picture of one channel.
        loss_fn: ``(output, target) -> 0-dim loss``.
        pixels: height and width of the images, as published and for two cores.
        size: of the model whose speed is measured, as published and for two cores.
        speed: its first row is the baseline.
        micro_batch: samples in a micro-batch, for two cores.
        max_micro_batches: in a mini-batch, for two cores.
        memory: its first row is the baseline.
        batch: samples in a mini-batch whose memory is measured, as published and for two cores.
        optimizer: of the measurements of memory, from parameters and a learning rate.
        param_scale: bytes that training holds for each byte of parameters.
    """

    model: str
    build: Callable[..., nn.Sequential]
    num_classes: int
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    pixels: tuple[int, int]
    size: tuple[tuple[int, ...], tuple[int, ...]]
    speed: tuple[Speed, ...]
    micro_batch: int
    max_micro_batches: int = 64
    memory: tuple[Memory, ...] = ()
    batch: tuple[int, int] = (0, 0)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    param_scale: int = 2

    def target_shape(self, batch: int, pixels: int) -> tuple[int, ...]:
        """Return the shape of so many targets."""
        return (batch,) if self.num_classes else (batch, 1, pixels, pixels)


def _unet(num_convs: int, channels: int) -> nn.Sequential:
    return unet(5, num_convs, channels)


def _amoebanet(num_layers: int, num_filters: int) -> nn.Sequential:
    return amoebanetd(1000, num_layers, num_filters)


EXPERIMENTS = {
    "unet": Experiment(
        "U-Net (B, C)",
        _unet,
        0,
        F.binary_cross_entropy_with_logits,
        pixels=(192, 64),
        size=((5, 64), (5, 8)),
        micro_batch=2,
        speed=(
            Speed(BASELINE, 1, 1, 40, (), 28.500),
            Speed("pipeline-1", 1, 2, 40, (241,), 24.456),
            Speed("pipeline-2", 2, 32, 16, (104, 137), 35.502),
            Speed("pipeline-4", 4, 16, 32, (30, 66, 84, 61), 67.042),
            Speed("pipeline-8", 8, 40, 16, (16, 27, 31, 44, 22, 57, 27, 17), 88.497),
        ),
        memory=(
            Memory(BASELINE, 1, 1, (6, 72), (2, 16), (), 362.2e6, 20.3),
            Memory("pipeline-1", 1, 32, (11, 128), (4, 28), (505,), 2.21e9, 20.5),
            Memory("pipeline-2", 2, 32, (24, 128), (8, 28), (526, 551), 4.99e9, 43.4),
            Memory("pipeline-4", 4, 32, (24, 160), (8, 36), (472, 54, 36, 515), 7.80e9, 79.1),
            Memory(
                *("pipeline-8", 8, 128, (48, 160), (16, 36)),
                (800, 140, 62, 36, 36, 36, 36, 987),
                *(15.82e9, 154.1),
            ),
        ),
        batch=(32, 8),
    ),
    "amoebanet": Experiment(
        "AmoebaNet-D (L, D)",
        _amoebanet,
        1000,
        F.cross_entropy,
        pixels=(224, 64),
        size=((18, 256), (18, 32)),
        micro_batch=2,
        speed=(
            Speed(BASELINE, 1, 1, 48),
            Speed("n=2, m=1", 2, 1, 96, (7, 17), 26.733, 1.0),
            Speed("n=2, m=4", 2, 4, 64, (9, 15), 41.133, 1.07),
            Speed("n=2, m=32", 2, 32, 40, (9, 15), 47.386, 1.21),
            Speed("n=4, m=1", 4, 1, 160, (3, 4, 5, 12), 26.827, 1.13),
            Speed("n=4, m=4", 4, 4, 90, (3, 6, 7, 8), 44.543, 1.26),
            Speed("n=4, m=32", 4, 32, 36, (3, 6, 7, 8), 72.412, 1.84),
            Speed("n=8, m=1", 8, 1, 196, (2, 2, 2, 2, 2, 3, 4, 7), 24.918, 1.38),
            Speed("n=8, m=4", 8, 4, 120, (2, 2, 2, 3, 3, 4, 4, 4), 70.065, 1.72),
            Speed("n=8, m=32", 8, 32, 40, (2, 2, 2, 3, 3, 4, 4, 4), 132.413, 3.48),
        ),
        memory=(
            Memory(BASELINE, 1, 1, (18, 208), (18, 32), (), 81.5e6, None, 6.26),
            Memory("pipeline-1", 1, 128, (18, 416), (18, 64), (24,), 319.0e6, 4.48, 3.46),
            Memory("pipeline-2", 2, 128, (18, 544), (18, 80), (16, 8), 542.7e6, 9.46, 8.11),
            Memory(
                *("pipeline-4", 4, 128, (36, 544), (36, 80), (16, 12, 7, 7), 1.06e9),
                *(18.71, 15.21),
            ),
            Memory(
                *("pipeline-8", 8, 128, (72, 512), (72, 80), (23, 16, 11, 6, 6, 5, 5, 6)),
                *(1.84e9, 31.45, 26.24),
            ),
        ),
        batch=(128, 16),
        optimizer=torch.optim.RMSprop,
        param_scale=3,
    ),
    # Huang et al. show a figure, from which torchgpipe's page reads.
    "resnet": Experiment(
        "ResNet-101",
        resnet101,
        1000,
        F.cross_entropy,
        pixels=(224, 32),
        size=((), ()),
        micro_batch=8,
        max_micro_batches=8,
        speed=(
            Speed(BASELINE, 1, 1, 118, (), 95.862, 1.0),
            Speed("pipeline-1", 1, 2, 110, (370,), 81.796, 0.80),
            Speed("pipeline-2", 2, 1667, 15, (135, 235), 135.539, 1.42),
            Speed("pipeline-4", 4, 256, 22, (44, 92, 124, 110), 265.958, 2.18),
            Speed("pipeline-8", 8, 150, 36, (26, 22, 33, 44, 44, 66, 66, 69), 411.662, 2.89),
        ),
    ),
}

#: Top-1 errors of ResNet-101 on ImageNet in percent, 256 images a mini-batch: mean and deviation.
ERROR_OF_TORCHGPIPE, ERROR_WITHOUT = "21.99±0.13", "22.02±0.11"
