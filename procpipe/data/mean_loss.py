"""The loss of a mini-batch, made of those of its micro-batches and of what each counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from procpipe.data.loss import Loss, or_one


class MeanLoss:
    """The loss of one mini-batch, made of those of its micro-batches; on the last stage.

        loss_fn returns a mean           loss = sum of weight * mean / total
        loss_fn returns (sum, weight)    loss = sum of sums / total

    The total is that of the weights, or the user's. Of one of n mini-batches that accumulate, loss
    and gradients are also divided by n, as by ``(loss / n).backward()``. Gradients are divided
    before a backward pass begins. But with sums, and unless the user gave it, the total is known
    only after the last forward task, and a schedule may have run backward tasks before. They are
    divided by the total to be expected, by what a sample counted in the step before. In the end all
    gradients of the mini-batch are multiplied by a correction, see :func:`mean_of`.

    Args:
        loss: the user's function.
        weights: what each micro-batch counts; of sums, their samples.
        total_weight: what the sum is divided by; None for the sum of the weights.
        is_sent: whether the other stages need the sum of the weights from this one.
        accumulate: of how many mini-batches this is one whose gradients are added up.
        whole: what the micro-batches of all replicas count, if there are several; of sums, their
            samples. Then the total of sums is known on no stage before the end.
    """

    def __init__(
        self,
        loss: Loss,
        weights: Sequence[float],
        total_weight: float | None = None,
        *,
        accumulate: int = 1,
        is_sent: bool = False,
        whole: float | None = None,
    ) -> None:
        self._loss = loss
        self._weights = weights
        self._total_weight = total_weight
        self._accumulate = accumulate
        self._is_sent = is_sent
        self._whole = whole
        total = total_weight
        if total is None:
            total = math.fsum(weights) if whole is None else whole
        self._shares = [weight / total if total else 0.0 for weight in weights]
        self._sum: Tensor | None = None
        self._counted: dict[int, Tensor] = {}  # of sums, what each micro-batch counts
        self._divisor: Tensor | None = None
        self._is_divisor_exact = True

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the user's function, if it is a module."""
        for module in self._loss.modules():
            yield from module.parameters()

    def is_left_out(self, i: int) -> bool:
        """Whether micro-batch ``i`` counts nothing, so that its loss is 0 whatever its output."""
        return self._shares[i] == 0 and not self._loss.is_sum

    def of(self, i: int, output: Any, target: Any) -> Any:
        """Return the loss of micro-batch ``i``, or its sum and weight; see :meth:`Loss.of`."""
        return self._loss.of(output, target, is_left_out=self.is_left_out(i))

    def add(self, i: int, loss: Tensor, weight: Tensor | None = None) -> None:
        """Count what :meth:`of` returned for micro-batch ``i``, detached."""
        if weight is not None:
            self._counted[i] = weight
        part = loss if weight is not None else loss * self._shares[i]
        self._sum = part if self._sum is None else self._sum + part

    def gradient(self, i: int, loss: Tensor) -> Tensor:
        """Return the gradient with which the backward pass of a micro-batch's loss begins."""
        if (scale := self._loss.scale) is None:
            return self._share(i, loss, loss.dtype)
        # In float16 a scale alone may be inf, and a small share 0.
        wide = torch.promote_types(loss.dtype, torch.float32)
        return scale(self._share(i, loss, wide)).to(loss.dtype)

    def _share(self, i: int, loss: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._loss.is_sum:
            if self._accumulate == 1:
                return torch.full_like(loss, self._shares[i], dtype=dtype)
            # In autograd's order of operations, so as (loss / n).backward() to the last bit.
            return torch.full_like(loss, 1 / self._accumulate, dtype=dtype) * self._shares[i]
        if self._divisor is None:
            self._divisor = or_one(self._expected_total()) * self._accumulate
        return self._divisor.reciprocal().to(loss.device, dtype)

    def _expected_total(self) -> Tensor:
        """Return the total of sums, 0-dim, or what it is expected to be, and note which."""
        so_far = self._weight_so_far()
        if self._total_weight is not None:
            return torch.full_like(so_far, self._total_weight)
        is_all_counted = len(self._counted) == len(self._weights)
        self._is_divisor_exact = self._whole is None and is_all_counted
        if self._whole is not None:
            return self._loss.expected(self._whole).to(so_far.device)
        if is_all_counted:
            return so_far
        known = math.fsum(self._weights[k] for k in self._counted)
        rate = self._loss.weight_per_sample
        rate = so_far / known if rate is None else rate.to(so_far.device)
        # Where nothing is known, a sample counts 1.
        return so_far + or_one(rate) * (math.fsum(self._weights) - known)

    def _weight_so_far(self) -> Tensor:
        return torch.stack([self._counted[i] for i in sorted(self._counted)]).sum()

    @property
    def part(self) -> LossPart:
        """This stage's part of the loss, once all its micro-batches are counted."""
        assert self._sum is not None, "a mini-batch has a micro-batch"
        divisor = None if self._is_divisor_exact else self._divisor
        return LossPart(self._sum, self.weight, divisor)

    @cached_property
    def weight(self) -> Tensor | float | None:
        """What the mini-batch counts; None if all stages have that number."""
        if not self._loss.is_sum:
            return math.fsum(self._weights) if self._is_sent else None
        weight = self._weight_so_far()
        if self._whole is None:
            self.warn_of_sum(weight)
        return weight

    def warn_of_sum(self, weight: Tensor | float | None) -> None:
        """Warn, once, if sums count nothing; not on a GPU, where the host would wait."""
        if isinstance(weight, Tensor) and weight.device.type == "cpu" and not weight:
            self._loss.warn_of_no_weight("loss_fn counts 0 in every micro-batch of a mini-batch")


class LossPart(NamedTuple):
    """One last stage's part of a mini-batch's loss."""

    #: Of weighted means, divided by the total already, but not by ``accumulate``; or of the
    #: sums that ``loss_fn`` returned. 0-dim.
    sum: Tensor
    #: What the mini-batch counts: 0-dim where ``loss_fn`` returns it; None if all stages have it.
    weight: Tensor | float | None = None
    #: Of sums, what gradients were divided by, 0-dim, if that was not the total.
    divisor: Tensor | None = None


def mean_of(
    part: LossPart, total_weight: float | None, accumulate: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of a mini-batch and what its gradients are to be multiplied by, both 0-dim.

    The second is None if gradients are right already. ``part`` is that of the last stage; with
    replicas, that of all replicas. ``total_weight`` is the user's, or None; ``accumulate``, of how
    many mini-batches this is one.
    """
    if not isinstance(part.weight, Tensor):
        return part.sum if accumulate == 1 else part.sum / accumulate, None
    total = part.weight
    if total_weight is not None:
        total = torch.full_like(part.weight, total_weight)
    total = or_one(total) * accumulate
    correction = None if part.divisor is None else part.divisor / total
    return part.sum / total.to(part.sum), correction
