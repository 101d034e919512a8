"""AmoebaNet-D (18, 256), 2, 4 and 8 devices by 1, 4 and 32 micro-batches."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.published import speed
from benchmarks.published.experiment import BASELINE, Experiment, Scale, Setting
from benchmarks.published.figures import AMOEBANET_SPEED
from examples.models.amoebanet import amoebanetd

_NUM_CLASSES = 1000


def _target(batch_size: int, image_size: int) -> Tensor:
    return torch.randint(_NUM_CLASSES, (batch_size,))


def _setting(n: int, m: int, batch_size: int, balance: tuple[int, ...]) -> Setting:
    checkpoint = "always" if m == 1 else "except_last"
    return Setting(f"n={n}, m={m}", n, m, batch_size, checkpoint, balance)


EXPERIMENT = Experiment(
    part="amoebanet_speed",
    model="AmoebaNet-D (L, D)",
    build=lambda num_layers, num_filters: amoebanetd(_NUM_CLASSES, num_layers, num_filters),
    target=_target,
    loss_fn=F.cross_entropy,
    # Source: https://github.com/kakaobrain/torchgpipe, benchmarks/amoebanetd-speed.
    settings=(
        _setting(2, 1, 96, (7, 17)),
        _setting(2, 4, 256, (9, 15)),
        _setting(2, 32, 1280, (9, 15)),
        _setting(4, 1, 160, (3, 4, 5, 12)),
        _setting(4, 4, 360, (3, 6, 7, 8)),
        _setting(4, 32, 1152, (3, 6, 7, 8)),
        _setting(8, 1, 196, (2, 2, 2, 2, 2, 3, 4, 7)),
        _setting(8, 4, 480, (2, 2, 2, 3, 3, 4, 4, 4)),
        _setting(8, 32, 1280, (2, 2, 2, 3, 3, 4, 4, 4)),
    ),
    # None was published; it relates the measurements with 2, 4 and 8 processes.
    baseline=Setting(BASELINE, 1, 1, 48),
    reference="n=2, m=1",
    figures=AMOEBANET_SPEED,
    published=Scale((18, 256), 224),
    small=Scale((18, 32), 64, micro_batch=2),
)

configure = partial(speed.configure, experiment=EXPERIMENT)
run = partial(speed.run, experiment=EXPERIMENT)
