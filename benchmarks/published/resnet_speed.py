"""ResNet-101 on 1, 2, 4 and 8 devices."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.published import speed
from benchmarks.published.experiment import BASELINE, Experiment, Scale, Setting
from benchmarks.published.figures import RESNET_SPEED
from examples.models.resnet import resnet101

_NUM_CLASSES = 1000


def _target(batch_size: int, image_size: int) -> Tensor:
    return torch.randint(_NUM_CLASSES, (batch_size,))


EXPERIMENT = Experiment(
    part="resnet_speed",
    model="ResNet-101",
    build=lambda: resnet101(_NUM_CLASSES),
    target=_target,
    loss_fn=F.cross_entropy,
    # Source: https://github.com/kakaobrain/torchgpipe, benchmarks/resnet101-speed.
    settings=(
        Setting("pipeline-1", 1, 2, 220, balance=(370,)),
        Setting("pipeline-2", 2, 1667, 25000, balance=(135, 235)),
        Setting("pipeline-4", 4, 256, 5632, balance=(44, 92, 124, 110)),
        Setting("pipeline-8", 8, 150, 5400, balance=(26, 22, 33, 44, 44, 66, 66, 69)),
    ),
    baseline=Setting(BASELINE, 1, 1, 118),
    reference=BASELINE,
    figures=RESNET_SPEED,
    published=Scale((), 224),
    small=Scale((), 32, micro_batch=8, max_micro_batches=8),
)

configure = partial(speed.configure, experiment=EXPERIMENT)
run = partial(speed.run, experiment=EXPERIMENT)
