"""The loss of a micro-batch, by the user's function; that of a mini-batch, their weighted mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.data.microbatch import scatter_like, uploaded
from procpipe.errors import NonFiniteLossError
from procpipe.notes import warn
from procpipe.torch_internals import pytree
from procpipe.tree import flatten, in_words

#: Whether a loss function is being called of which no one has said what it counts.
_is_unweighted: ContextVar[bool] = ContextVar("is_unweighted", default=False)

#: The target that the losses of torch and transformers leave out by default.
IGNORED = -100


@dataclass
class Loss:
    """The user's loss function and weight, with their results checked.

    What a micro-batch counts is known from its target, before its first task: by ``loss_weight``,
    else by the method ``num_counted`` of the loss function, else it is its number of samples. A
    micro-batch of weight 0 is left out: its loss may be NaN (a mean over no tokens), and 0 times
    NaN is NaN. The loss function is called all the same, as it may count or log.
    """

    function: Callable[..., Any] | None  # ``loss_fn`` of the ``Stage``
    weight: Callable[[Any], Any] | None  # ``loss_weight`` of the ``Stage``, or ``num_counted``
    #: Whether a loss that is NaN or infinite is an error; on a GPU, looking waits for the device.
    must_be_finite: bool = False
    #: Multiplies the gradient with which a backward pass begins, see ``Stage.scaler``.
    scale: Callable[[Tensor], Tensor] | None = field(default=None, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.weight is None:
            self.weight = getattr(self.function, "num_counted", None)

    def of(self, output: Any, target: Any, *, is_left_out: bool = False) -> Tensor:
        """Return the mean loss of one micro-batch, 0-dim.

        Args:
            output: the model's.
            target: what ``loss_fn`` gets beside it; None for nothing.
            is_left_out: whether it is to be 0, and with it the gradients of ``output``.
        """
        assert self.function is not None, "checked before the step"
        # Before the loss function, which may change the output in place.
        zero = _zero_of(output) if is_left_out else None
        token = _is_unweighted.set(self.weight is None)
        try:
            loss = self.function(output) if target is None else self.function(output, target)
        finally:
            _is_unweighted.reset(token)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss)}"
            raise ValueError(
                f"loss_fn returned {shape}, but must return the mean over the micro-batch's "
                "samples, a 0-dim tensor (reduction='mean'); if it is a mean over something else, "
                "such as tokens, Stage(…, loss_weight=…) says how many a target has"
            )
        if zero is not None:
            # Without gradients it is made anew: a copy from the host would wait for the device.
            return zero.to(loss) if zero.requires_grad else torch.zeros_like(loss)
        if self.must_be_finite and not loss.isfinite():
            finite = torch.cat([tensor.isfinite().flatten() for tensor in flatten(output)[0]])
            raise NonFiniteLossError(
                f"the loss is {loss.item()}; the output is {in_words(output)}, "
                f"{1 - finite.double().mean():.1%} of it not finite: lower the learning rate, clip "
                "gradients, or look for the layer with torch.autograd.detect_anomaly()"
            )
        return loss

    def modules(self) -> list[nn.Module]:
        """Return the user's function, if it is a module."""
        return [self.function] if isinstance(self.function, nn.Module) else []

    def weights(self, target: Any, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return what each micro-batch counts, from the target, if there is one, and its size.

        Warns, once, if the target holds what torch's losses ignore, and nothing says what counts;
        not of one on a GPU, whose host would wait.
        """
        if self.weight is None:
            leaves = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
            known = [t for t in leaves if t.dtype == torch.int64 and t.device.type == "cpu"]
            if not self._has_warned and any((tensor == IGNORED).any() for tensor in known):
                self.warn_once(
                    f"a target holds {IGNORED}, which losses leave out, but each micro-batch "
                    "counts as many times as it has samples: give Stage(…, loss_weight=lambda "
                    f"target: (target != {IGNORED}).sum()) for the mean over all that count"
                )
            return tuple(map(float, sizes))
        if target is None:
            raise ValueError(
                "loss_weight needs a target, and so does num_counted of loss_fn: give one, by "
                "step(input, target), step(…, target=y) or step(**batch) with labels"
            )
        found = tuple(float(self.weight(part)) for part in scatter_like(target, sizes))
        total = sum(found)
        if any(not weight >= 0 for weight in found) or not total < math.inf:
            raise ValueError(
                f"the loss weights of the micro-batches are {list(found)}, which add up to {total}:"
                " each must be a finite number from 0, and so must be their sum"
            )
        return found

    def warn_once(self, text: str) -> None:
        """Warn of weights, unless that was done before."""
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text}; this warning is given once", RuntimeWarning)


@dataclass
class MeanLoss:
    """The loss of one mini-batch, made of those of its micro-batches; on the last stage.

        loss = sum of weight * mean / total

    Of one of n mini-batches that accumulate, loss and gradients are also divided by n, as by
    ``(loss / n).backward()``. Gradients are divided before a backward pass begins.
    """

    loss: Loss  # the user's function
    targets: Sequence[Any]  # of each micro-batch; None for nothing
    weights: Sequence[float]  # what each micro-batch counts; one of 0 is left out
    #: Returns what the micro-batches of all replicas count. It may wait for them, so it is called
    #: when that is needed first.
    get_whole: Callable[[], float]
    total_weight: float | None = None  # what the sum is divided by; None for what all count
    accumulate: int = 1  # of how many mini-batches this is one whose gradients are added up
    #: Of the micro-batches' losses, once the first is needed.
    _gradients: Sequence[Tensor] = field(default=(), init=False)

    @cached_property
    def _whole(self) -> float:
        return self.get_whole()

    def _shares(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return what each micro-batch is multiplied by in the mean, ``(m,)``."""
        total = self._whole if self.total_weight is None else self.total_weight
        shares = [weight / total if total else 0.0 for weight in self.weights]
        return uploaded(torch.tensor(shares, dtype=torch.float64), device).to(dtype)

    def of(self, i: int, output: Any) -> Tensor:
        """Return the loss of micro-batch ``i``; see :meth:`Loss.of`."""
        return self.loss.of(output, self.targets[i], is_left_out=not self.weights[i])

    def gradient(self, i: int, loss: Tensor) -> Tensor:
        """Return the gradient with which the backward pass of a micro-batch's loss begins."""
        if not self._gradients:  # all at once: one of 0 dimensions takes as long as all
            self._gradients = self._divided(loss.dtype, loss.device).unbind()
        return self._gradients[i]

    def _divided(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the gradients of all micro-batches' losses, ``(m,)``."""
        # In float16 a scale alone may be inf, and a small share 0.
        scale = self.loss.scale
        wide = dtype if scale is None else torch.promote_types(dtype, torch.float32)
        gradients = self._shares(device, wide)
        if self.accumulate != 1:
            # In autograd's order of operations, so as (loss / n).backward() to the last bit.
            gradients = torch.full_like(gradients, 1 / self.accumulate) * gradients
        return gradients if scale is None else scale(gradients).to(dtype)

    def part(self, losses: Mapping[int, Tensor]) -> tuple[Tensor, float]:
        """Return this replica's part of the loss, from the micro-batches', and what all count."""
        means = torch.stack([losses[i] for i in sorted(losses)])
        dtype = torch.result_type(means, 1.0)  # a loss that counts is an int
        # All at once, rounded as products of one and a float, but added up in order.
        wide = torch.promote_types(dtype, torch.float32)
        parts = (means.to(wide) * self._shares(means.device, wide)).to(dtype)
        loss = reduce(add, parts.unbind())
        return loss if self.accumulate == 1 else loss / self.accumulate, self._whole


def check_weighted(name: str) -> None:
    """Check, in a loss function that counts, that the stage which calls it knows what it counts.

    Raises:
        TypeError: it is called by another function, as which the stage has it.
    """
    if _is_unweighted.get():
        raise TypeError(
            f"{name} is a mean over the targets that count, but it is called by a loss_fn of which "
            f"the stage does not know how many these are: give Stage(…, loss_weight="
            f"{name}.num_counted), or a function of the target that counts them"
        )


def divisors(total_weight: Any, accumulate: Any) -> dict[str, Any]:
    """Return the two arguments of a ``step`` that say what its loss is divided by, checked."""
    if total_weight is not None and accumulate is not None:
        raise ValueError(
            f"step() was given accumulate={accumulate} and total_weight={total_weight}, of which "
            "each says what the loss is divided by: give accumulate for the mean over "
            "mini-batches, or total_weight for the mean over all that counts in them"
        )
    total = None if total_weight is None else float(total_weight)
    if total is not None and not 0 < total < math.inf:
        raise ValueError(
            f"total_weight is {total}, which the loss is divided by: give a finite number above 0, "
            "such as all tokens that count in the mini-batches whose gradients are added up"
        )
    number = 1 if accumulate is None else accumulate
    if type(number) is not int or number < 1:
        raise ValueError(
            f"accumulate is {number!r}, but must be the number of mini-batches whose gradients are "
            "added up, an int from 1"
        )
    return {"total_weight": total, "accumulate": number}


def _zero_of(output: Any) -> Tensor:
    """Return a loss of 0, 0-dim, whose gradients of an output's tensors are exactly 0.

    ``masked_fill`` lets no NaN through, neither forward nor backward.
    """
    zero = torch.zeros(())
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            everything = torch.ones((), dtype=torch.bool, device=tensor.device)
            zero = zero + tensor.masked_fill(everything, 0).sum().real
    return zero
