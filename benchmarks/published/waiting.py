"""A U-shaped model whose layers take a fixed time without using a core.

    stage 0   wait, stash "outer" ─────────────────────────> pop "outer", wait   stage 3
    stage 1       wait, stash "inner" ─────> pop "inner", wait                   stage 2

Its messages are real, so it shows how a pipeline handles them, also on a machine with fewer cores
than stages.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from examples.models.unet import Stash
from procpipe.skip import Namespace, pop, skippable

#: One waiting layer and one skip layer on each stage.
BALANCE = [2, 2, 2, 2]


def waiting_unet(task_s: float) -> nn.Sequential:
    """Build the model, which returns its input plus two skip tensors.

    Args:
        task_s: seconds of a forward on each stage; a backward takes twice as long.
    """
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            encode0=Wait(task_s),
            encode0_stash=Stash().isolate(outer),  # type: ignore[operator]
            encode1=Wait(task_s),
            encode1_stash=Stash().isolate(inner),  # type: ignore[operator]
            decode1_pop=PopAdd().isolate(inner),  # type: ignore[operator]
            decode1=Wait(task_s),
            decode0_pop=PopAdd().isolate(outer),  # type: ignore[operator]
            decode0=Wait(task_s),
        )
    )


class Wait(nn.Module):
    """Simulates a computation with a parameter, whose gradient is 0."""

    def __init__(self, task_s: float) -> None:
        super().__init__()
        self.task_s = task_s
        self.parameter = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and return the input's values."""
        output: Tensor = _Wait.apply(x, self.parameter, self.task_s)  # type: ignore[no-untyped-call]
        return output


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, task_s: float) -> Tensor:
        ctx.task_s = task_s
        time.sleep(task_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.task_s)
        return gradient, gradient.new_zeros(()), None


@skippable(pop=["skip"])
class PopAdd(nn.Module):
    """Adds the skip tensor to its input."""

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        """Add two tensors of one shape."""
        skip = yield pop("skip")
        return input + skip
