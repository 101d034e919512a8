"""U-Net (5, 64) on 1, 2, 4 and 8 devices: a pipeline's speed with long skip connections."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.published import speed
from benchmarks.published.experiment import BASELINE, Experiment, Scale, Setting
from benchmarks.published.figures import UNET_SPEED
from examples.models.unet import unet


def _target(batch_size: int, image_size: int) -> Tensor:
    return torch.ones(batch_size, 1, image_size, image_size)


EXPERIMENT = Experiment(
    part="unet_speed",
    model="U-Net (B, C)",
    build=lambda num_convs, channels: unet(5, num_convs, channels),
    target=_target,
    loss_fn=F.binary_cross_entropy_with_logits,
    # Source: https://github.com/kakaobrain/torchgpipe, benchmarks/unet-speed.
    settings=(
        Setting("pipeline-1", 1, 2, 80, balance=(241,)),
        Setting("pipeline-2", 2, 32, 512, balance=(104, 137)),
        Setting("pipeline-4", 4, 16, 512, balance=(30, 66, 84, 61)),
        Setting("pipeline-8", 8, 40, 640, balance=(16, 27, 31, 44, 22, 57, 27, 17)),
    ),
    baseline=Setting(BASELINE, 1, 1, 40),
    reference=BASELINE,
    figures=UNET_SPEED,
    published=Scale((5, 64), 192),
    small=Scale((5, 8), 64, micro_batch=2),
)

configure = partial(speed.configure, experiment=EXPERIMENT)
run = partial(speed.run, experiment=EXPERIMENT)
