"""The user's loss function and weight, with their results checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from procpipe.data.microbatch import shares
from procpipe.data.remote import Remote
from procpipe.errors import NonFiniteLossError
from procpipe.torch_internals import pytree
from procpipe.tree import flatten, in_words


@dataclass
class Loss:
    """The user's loss function and weight, with their results checked.

    A micro-batch whose share is 0 is left out: its loss may be NaN (a mean over no tokens), and 0
    times NaN is NaN. The loss function is called all the same, as it may count or log.

    Attributes:
        function: ``loss_fn`` of the ``Stage``.
        weight: ``loss_weight`` of the ``Stage``.
        must_be_finite: whether a loss that is NaN or infinite is an error; on a GPU, looking
            waits for the device.
    """

    function: Callable[..., Any] | None
    weight: Callable[[Any], Any] | None
    must_be_finite: bool = False
    _has_warned: bool = field(default=False, init=False)

    def check(self) -> None:
        """Check that there is a loss function."""
        if self.function is None:
            raise ValueError(
                "step() needs a loss: give Stage(…, loss_fn=…), or call stage(input) and run the "
                "loss of its output backward"
            )

    def of(self, output: Any, target: Any, share: float = 1.0) -> Tensor:
        """Return the loss of one micro-batch, 0-dim.

        Args:
            output: the model's.
            target: what ``loss_fn`` gets beside it; None for nothing.
            share: the micro-batch's in the loss of the mini-batch. If it is 0, so is the result,
                and so are the gradients of ``output``.
        """
        assert self.function is not None, "checked before the step"
        if isinstance(target, Remote):
            raise ValueError(
                f"the target of step() is {target!r} on every rank: give it on rank 0 or on the "
                "last stage as a real value"
            )
        # Before the loss function, which may change the output in place.
        zero = _zero_of(output) if share == 0 else None
        loss = self.function(output) if target is None else self.function(output, target)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            form = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss)}"
            raise ValueError(
                f"loss_fn returned {form}, but must return the mean over the micro-batch's "
                "samples, a 0-dim tensor (reduction='mean')"
            )
        if zero is not None:
            return zero.to(loss)
        if self.must_be_finite and not loss.isfinite():
            raise NonFiniteLossError(
                f"the loss is {loss.item()}; the output is {in_words(output)}, "
                f"{_share_not_finite(output)} of it not finite: lower the learning rate, clip "
                "gradients, or look for the layer with torch.autograd.detect_anomaly()"
            )
        return loss

    def shares(self, targets: Sequence[Any] | None, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return each micro-batch's share in the loss; ``targets`` None where there are none."""
        if self.weight is None:
            return tuple(shares(sizes))
        if targets is None:
            raise ValueError(
                "loss_weight needs a target: give one to step() on rank 0 or on the last stage, or "
                "leave loss_weight out"
            )
        found = shares([float(self.weight(target)) for target in targets])
        if not any(found) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "loss_weight is 0 for every micro-batch of a mini-batch, so its loss and its "
                "gradients are 0; this warning is given once",
                RuntimeWarning,
                stacklevel=5,  # the line that calls step()
            )
        return tuple(found)


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
