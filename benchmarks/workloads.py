"""The models that contenders train, each chosen for what it shows about a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.unet import unet
from procpipe.balance import balance_by_time


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        name: as on the command line.
        shows: what it shows about a pipeline, in a few words.
        sizes: the model and its micro-batch, in a few words.
        model: builds it, the same on every rank.
        input_shape: of one micro-batch; float.
        target_shape: of one micro-batch; float between 0 and 1.
        loss_fn: ``(output, target) -> 0-dim loss``, the mean over samples.
        is_even: whether all layers cost the same; else the balance is found by time.
        has_skips: whether it has skip tensors.
    """

    name: str
    shows: str
    sizes: str
    model: Callable[[], nn.Sequential]
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
    is_even: bool = True
    has_skips: bool = False


@dataclass(frozen=True)
class Job:
    """A workload on ``num_stages`` processes, in ``num_micro_batches``.

    All contenders of one launch share a job, and so one balance.
    """

    workload: Workload
    num_stages: int
    num_micro_batches: int
    _balances: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def input(self) -> Tensor:
        """A mini-batch's input, the same on every rank."""
        return self._data(self.workload.input_shape, seed=1)

    @cached_property
    def target(self) -> Tensor:
        """A mini-batch's target, the same on every rank."""
        return self._data(self.workload.target_shape, seed=2)

    def model(self) -> nn.Sequential:
        """Build the model, with the same parameters every time."""
        torch.manual_seed(0)
        return self.workload.model()

    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return each micro-batch's input and target."""
        m = self.num_micro_batches
        return list(zip(self.input.chunk(m), self.target.chunk(m), strict=True))

    def balance(self, num_partitions: int) -> list[int]:
        """Divide the layers among parts, the same on every rank, which all call it."""
        if num_partitions not in self._balances:
            self._balances[num_partitions] = self._find_balance(num_partitions)
        return self._balances[num_partitions]

    def _find_balance(self, num_partitions: int) -> list[int]:
        model = self.model()
        if self.workload.is_even:
            each, more = divmod(len(model), num_partitions)
            return [each + (part < more) for part in range(num_partitions)]
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            sample = self.input[: self.workload.input_shape[0]]
            found = [balance_by_time(num_partitions, model, sample)]
        dist.broadcast_object_list(found)
        return list(found[0])

    def _data(self, shape: tuple[int, ...], seed: int) -> Tensor:
        size = (shape[0] * self.num_micro_batches, *shape[1:])
        return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def _tiny() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])


def _transformer() -> nn.Sequential:
    layers = [
        nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True) for _ in range(8)
    ]
    return nn.Sequential(*layers)


def _mlp() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(8)])


def _unet() -> nn.Sequential:
    return unet(depth=3, num_convs=2, base_channels=16)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "tiny",
            "host cost of a task",
            "8 x Linear(16, 16), micro-batch 4",
            _tiny,
            (4, 16),
            (4, 16),
        ),
        Workload(
            "transformer",
            "the ordinary case",
            "8 layers, d 512, 128 tokens, micro-batch 4",
            _transformer,
            (4, 128, 512),
            (4, 128, 512),
        ),
        Workload(
            "mlp",
            "large activations, less compute",
            "8 x Linear(2048, 2048) and ReLU, micro-batch 128",
            _mlp,
            (128, 2048),
            (128, 2048),
        ),
        Workload(
            "unet",
            "skip routes, memory-bound layers",
            "U-Net of depth 3, 2 convolutions, base 16, 128 px, micro-batch 1",
            _unet,
            (1, 3, 128, 128),
            (1, 1, 128, 128),
            F.binary_cross_entropy_with_logits,
            is_even=False,
            has_skips=True,
        ),
    )
}
