"""Multiplies what one call adds to gradients by a number that is known only at its end.

begin            the gradients of earlier calls are set aside, before the first backward task
end(0.98)        ours * 0.98, added to them
end(None)        ours, added to them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from procpipe.torch_internals import has_gradient_hooks


class Correction:
    """Corrects the gradients of one call at a time."""

    def __init__(self) -> None:
        self._set_aside: dict[nn.Parameter, Tensor | None] = {}

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set aside the gradients of earlier calls, once a call."""
        if self._set_aside:
            return
        for parameter in parameters:
            if parameter not in self._set_aside and parameter.requires_grad:
                self._set_aside[parameter] = parameter.grad
                parameter.grad = None

    def end(
        self, factor: Tensor | None, input_gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> None:
        """Multiply this call's gradients, in place, and add them to those of earlier calls.

        Args:
            factor: 0-dim; None where they are right.
            input_gradients: of each micro-batch, those of the model's inputs.

        Raises:
            RuntimeError: hooks have used a parameter's gradient already.
        """
        of_call = [p.grad for p in self._set_aside if p.grad is not None]
        if factor is not None:
            self._check_hooks()
            of_inputs = [g for part in input_gradients.values() for g in part if g is not None]
            for gradient in [*of_call, *of_inputs]:
                gradient.mul_(factor.to(gradient))
        for parameter, before in self._set_aside.items():
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._set_aside.clear()

    def _check_hooks(self) -> None:
        for parameter in self._set_aside:
            if has_gradient_hooks(parameter):
                raise RuntimeError(
                    "loss_fn returns sums and weights, so gradients are not final before the end "
                    f"of step(), but a parameter of shape {tuple(parameter.shape)} has a hook that "
                    "is called before (register_post_accumulate_grad_hook): give step() a "
                    "total_weight, Stage a loss_weight, or use schedule='gpipe'"
                )

    def abandon(self) -> None:
        """Put back what was set aside, if a call has failed."""
        for parameter, before in self._set_aside.items():
            parameter.grad = before
        self._set_aside.clear()
