"""Gradients that are added up over replicas together, as one tensor.

Behind the gradients stands which of them there are: another replica may have those that are not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from procpipe.plan.buckets import bucketed


class Bucket:
    """Gradients of one dtype, of one device.

    Attributes:
        missing: the parameters whose gradients are not final yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.missing = set(parameters)
        self._parameters = parameters

    def copied(self) -> Tensor:
        """Return a copy of the gradients, as one tensor."""
        first = self._parameters[0]
        is_there, is_not = first.new_ones(1), first.new_zeros(1)  # the host waits for none
        parts, present = [], []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                parts.append(parameter.new_zeros(parameter.numel()))
                present.append(is_not)
                continue
            if gradient.layout != torch.strided:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which "
                    "replicas cannot add up: use a dense one (sparse=False)"
                )
            parts.append(gradient.detach().reshape(-1))
            present.append(is_there)
        return torch.cat([*parts, *present])

    def write(self, total: Tensor, fresh: Collection[nn.Parameter]) -> None:
        """Make the sum the gradients, or write it into those of earlier calls.

        Not into those of this call: what another stage is sent may share their memory.
        """
        sizes = [parameter.numel() for parameter in self._parameters]
        *sums, present = total.split([*sizes, len(sizes)])
        is_there: list[float] | None = None
        for k, (parameter, of_all) in enumerate(zip(self._parameters, sums, strict=True)):
            own = parameter.grad
            if own is not None and parameter not in fresh:
                own.copy_(of_all.view_as(own))
                continue
            if own is None and is_there is None:
                is_there = present.tolist()  # on a GPU the host waits, where a gradient is missing
            if own is not None or (is_there and is_there[k]):
                like = torch.empty_like(parameter, requires_grad=False)
                parameter.grad = like.copy_(of_all.view_as(like))


def buckets_of(
    parameters: Sequence[nn.Parameter], of_loss: Collection[nn.Parameter] = ()
) -> list[Bucket]:
    """Divide parameters, in the order of the model, into buckets.

    The last layers come first, as their gradients do. Those of a loss come last, in buckets of
    their own, as their gradients are final at the call's end only.
    """
    ordered = [p for p in reversed(parameters) if p not in of_loss]
    ordered += [p for p in parameters if p in of_loss]
    sizes = (((p.dtype, p in of_loss), p.nbytes) for p in ordered)
    return [Bucket([ordered[place] for place in places]) for places in bucketed(sizes)]
