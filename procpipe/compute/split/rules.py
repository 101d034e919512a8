"""The gradients of linear layers and convolutions: of the input, and of weight and bias, apart.

``x`` is the layer's input, and ``gradient`` that of its output. Under autocast both have a shorter
dtype than ``weight``. The results are bit by bit those of autograd, since the same kernels are
called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def has_rule(module: nn.Module) -> bool:
    """Return whether a module's stock forward is one that the functions below know."""
    of: Any = module
    if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return of.padding_mode == "zeros" and not isinstance(of.padding, str)
    return type(module).forward is nn.Linear.forward


def input_gradient(layer: nn.Module, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of ``x``, whose values do not matter."""
    weight = weight.to(gradient.dtype)
    if isinstance(layer, nn.Linear):
        return _rows(gradient).mm(weight).reshape(x.shape)
    of_x: Tensor = _of_convolution(layer, x, gradient, weight, None, (True, False, False))[0]
    return of_x


def weight_gradients(
    layer: nn.Module, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """Return the gradient of the weight and, if it is given, of the bias."""
    if isinstance(layer, nn.Linear):
        rows = _rows(gradient)
        of_weight = rows.t().mm(_rows(x))
        return [of_weight] if bias is None else [of_weight, rows.sum(0)]
    mask = (False, True, bias is not None)
    weight = weight.to(gradient.dtype)
    return [
        each
        for each in _of_convolution(layer, x, gradient, weight, bias, mask)[1:]
        if each is not None
    ]


def _of_convolution(
    layer: Any,
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: tuple[bool, bool, bool],
) -> Any:
    # What torch.nn.grad computes convolutions' gradients with.
    return torch.ops.aten.convolution_backward.default(
        gradient,
        x,
        weight,
        None if bias is None else bias.shape,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.transposed,
        layer.output_padding,
        layer.groups,
        mask,
    )


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix whose columns are its last dimension."""
    return tensor.reshape(-1, tensor.shape[-1])
