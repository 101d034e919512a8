"""How large an AmoebaNet-D (L, D) fits on 1, 2, 4 and 8 devices."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.published import memory
from benchmarks.published.experiment import BASELINE
from benchmarks.published.figures import AMOEBANET_MEMORY
from benchmarks.published.memory import Experiment, Setting
from examples.models.amoebanet import amoebanetd

_NUM_CLASSES = 1000


def _target(batch_size: int, image_size: int) -> Tensor:
    return torch.randint(_NUM_CLASSES, (batch_size,))


EXPERIMENT = Experiment(
    part="amoebanet_memory",
    model="AmoebaNet-D (L, D)",
    build=lambda num_layers, num_filters: amoebanetd(_NUM_CLASSES, num_layers, num_filters),
    target=_target,
    loss_fn=F.cross_entropy,
    optimizer=torch.optim.RMSprop,
    param_scale=3,
    # Source: https://github.com/kakaobrain/torchgpipe, benchmarks/amoebanetd-memory.
    settings=(
        Setting(BASELINE, (18, 208), 1, 1),
        Setting("pipeline-1", (18, 416), 1, 128, (24,)),
        Setting("pipeline-2", (18, 544), 2, 128, (16, 8)),
        Setting("pipeline-4", (36, 544), 4, 128, (16, 12, 7, 7)),
        Setting("pipeline-8", (72, 512), 8, 128, (23, 16, 11, 6, 6, 5, 5, 6)),
    ),
    batch_size=128,
    image_size=224,
    small_sizes=((18, 32), (18, 64), (18, 80), (36, 80), (72, 80)),  # D by two thirteenths
    small_batch_size=16,
    small_image_size=64,
    figures=AMOEBANET_MEMORY,
)

configure = partial(memory.configure, experiment=EXPERIMENT)
run = partial(memory.run, experiment=EXPERIMENT)
