"""Keeps gradients of earlier calls apart from those of the call that runs.

Of all parameters if these may be corrected; else of those that other stages have, too.

begin            the gradients of earlier calls are set aside, before the first backward task
correct(0.98)    those of this call are multiplied by a number that is known only at its end
end              those of this call are added to the earlier ones
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from procpipe.torch_internals import has_gradient_hooks


class Earlier:
    """The gradients of earlier calls, during one call at a time."""

    def __init__(self) -> None:
        self._set_aside: dict[nn.Parameter, Tensor | None] = {}

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set aside the gradients of earlier calls, once a call."""
        for parameter in parameters:
            if parameter not in self._set_aside:
                self._set_aside[parameter] = parameter.grad
                parameter.grad = None

    def correct(self, factor: Tensor, input_gradients: dict[int, list[Tensor | None]]) -> None:
        """Multiply this call's gradients, and those of micro-batches' inputs, by a 0-dim factor.

        Not in place: a gradient may be that of several inputs, have its memory in common with
        another, or be under way to another stage.

        Raises:
            RuntimeError: hooks have used a parameter's gradient already.
        """
        for parameter in self._set_aside:
            if parameter.requires_grad and has_gradient_hooks(parameter):
                raise RuntimeError(
                    "loss_fn returns sums and weights, so gradients are not final before the end "
                    f"of step(), but a parameter of shape {tuple(parameter.shape)} has a hook that "
                    "is called before (register_post_accumulate_grad_hook): give step() a "
                    "total_weight, Stage a loss_weight, or use schedule='gpipe'"
                )
        for i, gradients in input_gradients.items():
            input_gradients[i] = [_product(gradient, factor) for gradient in gradients]
        for parameter in self._set_aside:
            parameter.grad = _product(parameter.grad, factor)

    def end(self) -> None:
        """Add this call's gradients to those of earlier calls."""
        for parameter, before in self._set_aside.items():
            if before is not None:
                gradient = parameter.grad
                parameter.grad = before if gradient is None else before.add_(gradient)
        self._set_aside.clear()

    def abandon(self) -> None:
        """Put back what was set aside, if a call has failed."""
        for parameter, before in self._set_aside.items():
            parameter.grad = before
        self._set_aside.clear()


def _product(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return a gradient times a factor, which is not rounded to the gradient's dtype before."""
    if gradient is None:
        return None
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient * factor.to(gradient.device, wide)).to(gradient.dtype)
