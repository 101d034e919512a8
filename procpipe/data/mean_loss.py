"""The loss of a mini-batch, made of those of its micro-batches and of what each counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from procpipe.data.loss import Loss


@dataclass
class MeanLoss:
    """The loss of one mini-batch, made of those of its micro-batches; on the last stage.

        loss = sum of weight * mean / total

    Of one of n mini-batches that accumulate, loss and gradients are also divided by n, as by
    ``(loss / n).backward()``. Gradients are divided before a backward pass begins.
    """

    loss: Loss  # the user's function
    weights: Sequence[float]  # what each micro-batch counts
    #: Returns what the micro-batches of all replicas count. It may wait for them, so it is called
    #: when that is needed first.
    get_whole: Callable[[], float]
    total_weight: float | None = None  # what the sum is divided by; None for what all count
    accumulate: int = 1  # of how many mini-batches this is one whose gradients are added up
    is_sent: bool = False  # whether the other stages need what all count from this one
    _losses: dict[int, Tensor] = field(default_factory=dict, init=False)  # in order of their tasks

    @cached_property
    def _whole(self) -> float:
        return self.get_whole()

    @cached_property
    def _shares(self) -> list[float]:
        """What each micro-batch is multiplied by in the mean."""
        total = self._whole if self.total_weight is None else self.total_weight
        return [weight / total if total else 0.0 for weight in self.weights]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the user's function, if it is a module."""
        for module in self.loss.modules():
            yield from module.parameters()

    def is_left_out(self, i: int) -> bool:
        """Whether micro-batch ``i`` counts nothing, so that its loss is 0 whatever its output."""
        return not self.weights[i]

    def of(self, i: int, output: object, target: object) -> Tensor:
        """Return the loss of micro-batch ``i``; see :meth:`Loss.of`."""
        return self.loss.of(output, target, is_left_out=self.is_left_out(i))

    def add(self, i: int, loss: Tensor) -> None:
        """Count what :meth:`of` returned for micro-batch ``i``, detached."""
        self._losses[i] = loss

    def gradient(self, i: int, loss: Tensor) -> Tensor:
        """Return the gradient with which the backward pass of a micro-batch's loss begins."""
        if (scale := self.loss.scale) is None:
            return self._share(i, loss, loss.dtype)
        # In float16 a scale alone may be inf, and a small share 0.
        wide = torch.promote_types(loss.dtype, torch.float32)
        return scale(self._share(i, loss, wide)).to(loss.dtype)

    def _share(self, i: int, loss: Tensor, dtype: torch.dtype) -> Tensor:
        if self.accumulate == 1:
            return torch.full_like(loss, self._shares[i], dtype=dtype)
        # In autograd's order of operations, so as (loss / n).backward() to the last bit.
        return torch.full_like(loss, 1 / self.accumulate, dtype=dtype) * self._shares[i]

    @cached_property
    def part(self) -> LossPart:
        """This stage's part of the loss, once all its micro-batches are counted."""
        loss = reduce(add, (loss * self._shares[i] for i, loss in self._losses.items()))
        if self.accumulate != 1:
            loss = loss / self.accumulate
        return LossPart(loss, self._whole if self.is_sent else None)


class LossPart(NamedTuple):
    """What the last stage sends the others of a mini-batch's loss."""

    loss: Tensor  # 0-dim; with replicas, this one's part of the sum
    weight: float | None = None  # what the mini-batch counts; None if all stages know it
