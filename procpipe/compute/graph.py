"""The edges of a partition's autograd graph: ``Enter``, and the shapes of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from procpipe.errors import RecomputeError


@dataclass(slots=True)
class Entry:
    """Where the gradients of a micro-batch's inputs are put by the backward pass."""

    gradients: tuple[Tensor | None, ...] = ()


class Enter(torch.autograd.Function):
    """Received tensors become results of this node, which catches their gradients.

    ``detach`` makes aliases that are not views, so that layers may change them in place as in the
    plain model. They share their version with the received tensors, so that this is detected.
    (``mark_dirty`` would count as such a change itself.)
    """

    @staticmethod
    def forward(ctx: Any, entry: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Pass the tensors on; ``anchor`` requires a gradient, so that they do."""
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Put the gradients into the entry."""
        ctx.entry.gradients = gradients
        return (None,) * (2 + len(gradients))


def check_shapes(i: int, roots: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Check gradients against their roots: autograd would sum what can be broadcast.

    Raises:
        RecomputeError: they differ, which only recomputation can bring about.
    """
    for root, gradient in zip(roots, gradients, strict=True):
        if root.shape != gradient.shape:
            raise RecomputeError(
                f"the gradient of an output of micro-batch {i} has shape {tuple(gradient.shape)}, "
                f"as its first forward had, but recomputing it gave {tuple(root.shape)}: a layer "
                "takes another way the second time (see is_recomputing()); use checkpoint='never'"
            )
