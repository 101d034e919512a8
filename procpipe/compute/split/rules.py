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
        rows = _rows(gradient)
        of_rows = weight.t().mm(rows.t()).t() if _is_by_columns(_rows(x)) else rows.mm(weight)
        return of_rows.reshape(x.shape)
    of_x: Tensor = _of_convolution(layer, x, gradient, weight, None, (True, False, False))[0]
    return of_x


def weight_gradients(
    layer: nn.Module, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """Return the gradient of the weight and, if it is given, of the bias."""
    if isinstance(layer, nn.Linear):
        rows_in, rows = _rows(x), _rows(gradient)
        is_usual = _is_by_columns(weight.t())
        of_weight = rows.t().mm(rows_in) if is_usual else rows_in.t().mm(rows).t()
        if bias is None:
            return [of_weight]
        # Autograd adds the bias to the rows, or else to a product of the output's shape.
        is_of_rows = x.is_contiguous() or x.dim() <= 2
        return [of_weight, rows.sum(0) if is_of_rows else gradient.sum(list(range(x.dim() - 1)))]
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
    matrix: Tensor = torch.atleast_2d(tensor).flatten(0, -2)
    return matrix


def _is_by_columns(matrix: Tensor) -> bool:
    """Return whether autograd computes the gradient of a matrix by columns."""
    of_row, of_column = matrix.stride()
    return of_row == 1 and of_column == len(matrix)
