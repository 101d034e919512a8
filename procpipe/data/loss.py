"""The user's loss function and weight, with their results checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.data.remote import Remote
from procpipe.errors import NonFiniteLossError
from procpipe.notes import warn
from procpipe.torch_internals import pytree
from procpipe.tree import flatten, in_words


@dataclass
class Loss:
    """The user's loss function and weight, with their results checked.

    A micro-batch of weight 0 is left out: its loss may be NaN (a mean over no tokens), and 0 times
    NaN is NaN. The loss function is called all the same, as it may count or log.
    """

    function: Callable[..., Any] | None  # ``loss_fn`` of the ``Stage``
    weight: Callable[[Any], Any] | None  # ``loss_weight`` of the ``Stage``
    #: Whether a loss that is NaN or infinite is an error; on a GPU, looking waits for the device.
    must_be_finite: bool = False
    #: Whether the function returns a sum and its weight; None before the first step.
    is_sum: bool | None = field(default=None, init=False)
    #: Of sums, what a sample counted in the newest step; 0-dim.
    weight_per_sample: Tensor | None = field(default=None, init=False)
    #: Multiplies the gradient with which a backward pass begins, see ``Stage.scaler``.
    scale: Callable[[Tensor], Tensor] | None = field(default=None, init=False)
    #: What the mini-batch of the newest step counts; 0-dim, float64.
    last_weight: Tensor | None = field(default=None, init=False)
    _has_warned: bool = field(default=False, init=False)

    def check(self) -> None:
        """Check that there is a loss function."""
        if self.function is None:
            raise ValueError(
                "step() needs a loss: give Stage(…, loss_fn=…), or call stage(input) and run the "
                "loss of its output backward"
            )

    def of(self, output: Any, target: Any, *, is_left_out: bool = False) -> Any:
        """Return the loss of one micro-batch: its mean, 0-dim, or its sum and weight, both 0-dim.

        Args:
            output: the model's.
            target: what ``loss_fn`` gets beside it; None for nothing.
            is_left_out: whether a mean is to be 0, and with it the gradients of ``output``.
        """
        assert self.function is not None, "checked before the step"
        if isinstance(target, Remote):
            raise ValueError(
                f"the target of step() is {target!r} on every rank: give it on rank 0 or on the "
                "last stage as a real value"
            )
        if target is None:
            _check_takes_one(self.function, output)
        # Before the loss function, which may change the output in place.
        zero = _zero_of(output) if is_left_out else None
        result = self.function(output) if target is None else self.function(output, target)
        loss, weight = result if _is_pair(result) else (result, None)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ValueError(
                f"loss_fn returned {_form_of(result)}, but must return the mean over the "
                "micro-batch's samples, a 0-dim tensor (reduction='mean'), or a tuple of a sum, a "
                "0-dim tensor (reduction='sum'), and of what it counts, a number"
            )
        self._check_kind(is_sum=weight is not None)
        if zero is not None and weight is None:
            # Without gradients it is made anew: a copy from the host would wait for the device.
            return zero.to(loss) if zero.requires_grad else torch.zeros_like(loss)
        if self.must_be_finite and not loss.isfinite():
            raise NonFiniteLossError(
                f"the loss is {loss.item()}; the output is {in_words(output)}, "
                f"{_share_not_finite(output)} of it not finite: lower the learning rate, clip "
                "gradients, or look for the layer with torch.autograd.detect_anomaly()"
            )
        return loss if weight is None else (loss, _weight_of(weight, loss))

    def modules(self) -> list[nn.Module]:
        """Return the user's function, if it is a module."""
        return [self.function] if isinstance(self.function, nn.Module) else []

    def _check_kind(self, *, is_sum: bool) -> None:
        if is_sum and self.weight is not None:
            raise ValueError(
                "loss_fn returned a sum and its weight, and there is a loss_weight, too: leave "
                "one of them out"
            )
        if self.is_sum not in (None, is_sum):
            kinds = ("a mean", "a sum and its weight")
            raise ValueError(
                f"loss_fn returned {kinds[is_sum]}, but {kinds[not is_sum]} before: return the "
                "same kind each time"
            )
        self.is_sum = is_sum

    def weights(
        self, targets: Sequence[Any] | None, sizes: Sequence[int], *, is_share: bool = False
    ) -> tuple[float, ...]:
        """Return what each micro-batch counts, from its target, if it has one, and its size.

        ``is_share``: whether other replicas have more of the mini-batch, see ``warn_of_weights``.
        """
        if self.weight is None:
            return tuple(map(float, sizes))
        if targets is None:
            raise ValueError(
                "loss_weight needs a target: give one to step() on rank 0 or on the last stage, or "
                "leave loss_weight out"
            )
        found = tuple(float(self.weight(target)) for target in targets)
        total = sum(found)
        if any(not weight >= 0 for weight in found) or not total < math.inf:
            raise ValueError(
                f"the loss weights of the micro-batches are {list(found)}, which add up to {total}:"
                " each must be a finite number from 0, and so must be their sum"
            )
        if not is_share:
            self.warn_of_weights(found)
        return found

    def warn_of_weights(self, weights: Sequence[float]) -> None:
        """Warn, once, if no micro-batch of a mini-batch counts."""
        if not any(weights):
            self.warn_of_no_weight("loss_weight is 0 for every micro-batch of a mini-batch")

    def expected(self, num_samples: float) -> Tensor:
        """Return the expected weight of samples, for sums: per sample as in the step before."""
        rate = self.weight_per_sample
        if rate is None:
            rate = torch.ones((), dtype=torch.float64)
        return or_one(rate) * num_samples

    def note(self, loss: Tensor | None, weight: Tensor | float | None, whole: float) -> Tensor:
        """Keep what a ``step`` has shown; return its loss.

        Args:
            loss: of the mini-batch.
            weight: what it counts, if the last stage has sent that; a tensor for sums.
            whole: else what it counts; of sums, its samples.
        """
        assert loss is not None, "every step ends with a loss on every rank"
        self.is_sum = isinstance(weight, Tensor)
        if isinstance(weight, Tensor):
            self.weight_per_sample = weight / whole
        found = whole if weight is None else weight
        self.last_weight = torch.as_tensor(found, dtype=torch.float64)
        return loss

    def warn_of_no_weight(self, what: str) -> None:
        """Warn, once, of a mini-batch that counts nothing."""
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{what}, so its loss and its gradients are 0; this warning is given once",
                RuntimeWarning,
            )


def checked_total(weight: Any) -> float | None:
    """Return the ``total_weight`` of a ``step`` as a number."""
    if weight is None:
        return None
    total = float(weight)
    if not 0 < total < math.inf:
        raise ValueError(
            f"total_weight is {total}, which the loss is divided by: give a finite number above 0, "
            "such as all tokens that count in the mini-batches whose gradients are added up"
        )
    return total


def checked_accumulate(number: Any, total_weight: Any) -> int:
    """Return the ``accumulate`` of a ``step``; 1 if it has none."""
    if number is None:
        return 1
    if type(number) is not int or number < 1:
        raise ValueError(
            f"accumulate is {number!r}, but must be the number of mini-batches whose gradients are "
            "added up, an int from 1"
        )
    if total_weight is not None:
        raise ValueError(
            f"step() was given accumulate={number} and total_weight={total_weight}, of which each "
            "says what the loss is divided by: give accumulate for the mean over mini-batches, or "
            "total_weight for the mean over all that counts in them"
        )
    return number


def or_one(total: Tensor) -> Tensor:
    """Return a total, or 1 if it is 0: then what is divided by it is 0."""
    return torch.where(total == 0, torch.ones_like(total), total)


def _check_takes_one(function: Callable[..., Any], output: Any) -> None:
    """Check that a loss function can be called without a target."""
    call = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(call).bind(output)
    except TypeError as error:
        raise TypeError(
            f"loss_fn needs a target ({error}), but step() was given none: call step(input, "
            "target), step(…, target=y) or, for a batch of named values with labels, step(**batch)"
        ) from None
    except ValueError:  # it has no signature
        return


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2


def _weight_of(weight: Any, loss: Tensor) -> Tensor:
    """Return what a sum counts as a 0-dim tensor of float64 on the sum's device.

    It is checked unless it is on a GPU.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"loss_fn returned a sum and a weight of shape {tuple(weight.shape)}, which must "
                "be one number"
            )
        weight = weight.detach().reshape(())
    is_known = not isinstance(weight, Tensor) or weight.device.type == "cpu"  # else it would wait
    if is_known and not 0 <= (number := float(weight)) < math.inf:
        raise ValueError(
            f"loss_fn returned a sum and the weight {number}, which must be a finite number from 0"
        )
    if isinstance(weight, Tensor):
        return weight.to(loss.device, torch.float64)
    # Not torch.tensor(…): on a GPU that would wait for the device.
    return torch.full((), number, dtype=torch.float64, device=loss.device)


def _form_of(result: Any) -> str:
    if _is_pair(result):
        return f"a tuple of {_form_of(result[0])} and {_form_of(result[1])}"
    return f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"{type(result)}"


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


def _share_not_finite(value: Any) -> str:
    tensors, _ = flatten(value)
    num_elements = sum(tensor.numel() for tensor in tensors)
    num_finite = sum(int(tensor.isfinite().sum()) for tensor in tensors)
    return f"{1 - num_finite / max(1, num_elements):.1%}"
