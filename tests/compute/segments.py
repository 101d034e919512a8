"""Tasks of one partition without a pipeline, for layers given as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe.compute.layers import Layers
from procpipe.compute.segment import Segment
from procpipe.tree import Flat

CPU = torch.device("cpu")

BOTH = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


class Do(nn.Module):
    """A layer from a function of its modules and its inputs."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*self.parts, *inputs)


def segment_of(*layers: Any, **options: Any) -> Segment:
    """Return a partition of these layers, or of those of one dict, that is not the first."""
    is_named = len(layers) == 1 and isinstance(layers[0], dict)
    named = layers[0] if is_named else {str(k): layer for k, layer in enumerate(layers)}
    return Segment(Layers(named, CPU, is_first=False, **options))


def received(value: Any, requires_grad: bool = True) -> Flat:
    """Return a value as received from the stage before."""
    tensors, structure, _ = Flat.of(value)
    flags = tuple(requires_grad and tensor.is_floating_point() for tensor in tensors)
    return Flat([tensor.detach().clone() for tensor in tensors], structure, flags)


def forward(segment: Segment, i: int, inputs: Flat, **options: Any) -> Flat:
    """Run a forward task of one input and one output."""
    (output,) = segment.forward(i, [inputs], **options)
    return output


def backward(segment: Segment, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the only input."""
    (of_input,) = segment.backward(i, gradients)
    return of_input
