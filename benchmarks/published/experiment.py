"""What describes a published experiment of speed: its settings, and how large they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.published.figures import Speed

BASELINE = "baseline"

#: Micro-batches of the baseline where it is scaled: enough that an optimizer's step counts little.
_BASELINE_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        name: as published.
        num_stages: devices, one a stage.
        num_micro_batches: in a mini-batch.
        batch_size: samples in a mini-batch.
        checkpoint: what is recomputed.
        balance: number of layers in each stage; empty to have it found by time.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    batch_size: int
    checkpoint: str = "except_last"
    balance: tuple[int, ...] = ()

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch, the last of which may have fewer."""
        return -(-self.batch_size // self.num_micro_batches)

    @property
    def ideal(self) -> float:
        """Speed-up over one device if only the bubble of fill and drain took time."""
        m, n = self.num_micro_batches, self.num_stages
        return n * m / (m + n - 1)


@dataclass(frozen=True)
class Scale:
    """How large an experiment is.

    Attributes:
        size: of the model, as its builder takes it.
        image_size: height and width of the images.
        micro_batch: samples in a micro-batch; None for mini-batches and balances as published.
        max_micro_batches: in a mini-batch; larger published numbers are cut down to it.
    """

    size: tuple[int, ...]
    image_size: int
    micro_batch: int | None = None
    max_micro_batches: int = 1 << 20

    def of(self, setting: Setting) -> Setting:
        """Scale a published setting."""
        if self.micro_batch is None:
            return setting
        m = min(setting.num_micro_batches, self.max_micro_batches)
        return replace(setting, num_micro_batches=m, batch_size=m * self.micro_batch, balance=())


@dataclass(frozen=True)
class Experiment:
    """A published experiment of speed.

    Attributes:
        part: the name of its module.
        model: the name of the model and of its sizes.
        build: builds it from a scale's size.
        target: ``(batch_size, image_size) -> target``.
        loss_fn: ``(output, target) -> 0-dim loss``.
        settings: as published, those with the same number of stages one after the other.
        baseline: one device without a pipeline, as published.
        reference: the setting whose speed-up is 1.
        figures: the published figures of each setting, and of the baseline if there are any.
        published: the published scale.
        small: the scale for two cores.
    """

    part: str
    model: str
    build: Callable[..., nn.Sequential]
    target: Callable[[int, int], Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    settings: tuple[Setting, ...]
    baseline: Setting
    reference: str
    figures: Mapping[str, Speed]
    published: Scale
    small: Scale

    def baseline_at(self, scale: Scale) -> Setting:
        """Scale the baseline."""
        if scale.micro_batch is None:
            return self.baseline
        m = _BASELINE_MICRO_BATCHES
        return replace(self.baseline, num_micro_batches=m, batch_size=m * scale.micro_batch)

    def model_at(self, scale: Scale) -> nn.Sequential:
        """Build the model, with the same parameters every time."""
        torch.manual_seed(0)
        return self.build(*scale.size)

    def mini_batch(
        self, scale: Scale, batch_size: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Make an input and a target, random and not of any data set, as published."""
        input = torch.rand(batch_size, 3, scale.image_size, scale.image_size)
        return input.to(device), self.target(batch_size, scale.image_size).to(device)
