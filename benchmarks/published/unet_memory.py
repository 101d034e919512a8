"""How large a U-Net (B, C) fits on 1, 2, 4 and 8 devices."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.published import memory
from benchmarks.published.experiment import BASELINE
from benchmarks.published.figures import UNET_MEMORY
from benchmarks.published.memory import Experiment, Setting
from examples.models.unet import unet


def _target(batch_size: int, image_size: int) -> Tensor:
    return torch.rand(batch_size, 1, image_size, image_size)


EXPERIMENT = Experiment(
    part="unet_memory",
    model="U-Net (B, C)",
    build=lambda num_convs, channels: unet(5, num_convs, channels),
    target=_target,
    loss_fn=F.binary_cross_entropy_with_logits,
    optimizer=torch.optim.SGD,
    param_scale=2,
    # Source: https://github.com/kakaobrain/torchgpipe, benchmarks/unet-memory.
    settings=(
        Setting(BASELINE, (6, 72), 1, 1),
        Setting("pipeline-1", (11, 128), 1, 32, (505,)),
        Setting("pipeline-2", (24, 128), 2, 32, (526, 551)),
        Setting("pipeline-4", (24, 160), 4, 32, (472, 54, 36, 515)),
        Setting("pipeline-8", (48, 160), 8, 128, (800, 140, 62, 36, 36, 36, 36, 987)),
    ),
    batch_size=32,
    image_size=192,
    small_sizes=((2, 16), (4, 28), (8, 28), (8, 36), (16, 36)),  # a third, by two ninths
    small_batch_size=8,
    small_image_size=64,
    figures=UNET_MEMORY,
)

configure = partial(memory.configure, experiment=EXPERIMENT)
run = partial(memory.run, experiment=EXPERIMENT)
