"""Computes linear layers and convolutions: forward, input gradient and weight gradients apart.

A rule gets the layer's input ``x`` and the gradient of its output. Under autocast both have a
shorter dtype than ``weight`` and ``bias``.

The results are bit by bit those of autograd for the stock layer, since the same kernels are called
on the same layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Linear:
    """``x @ weight.T + bias`` over the last dimension of ``x``, as ``nn.Linear``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.linear(x, weight, bias)
        return output.detach() if output._is_view() else output

    def input_gradient(self, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(gradient.dtype)
        if x.dim() != 2:
            return _rows(gradient).mm(weight).reshape(x.shape)
        if x.stride() == (1, x.shape[0]):  # by columns, and so is its gradient
            return weight.t().mm(gradient.t()).t()
        return gradient.mm(weight)

    def weight_gradients(
        self, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows_in, rows_out = _rows(x), _rows(gradient)
        if weight.stride() == (weight.shape[1], 1):
            of_weight = rows_out.t().mm(rows_in)
        else:
            of_weight = rows_in.t().mm(rows_out).t()
        if bias is None:
            return of_weight, None
        if x.is_contiguous() or x.dim() <= 2:
            return of_weight, rows_out.sum(0)
        return of_weight, gradient.sum(tuple(range(gradient.dim() - 1)))  # added after a product


#: The rule of every ``nn.Linear``.
LINEAR = _Linear()


@dataclass(frozen=True, slots=True)
class Convolution:
    """``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d`` of a batch, padded with zeros on both sides."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, ``(batch, channels, …)``; no view, so it may be changed in place."""
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        output: Tensor = convolve(
            x, weight, bias, self.stride, self.padding, self.dilation, self.groups
        )
        return output

    def input_gradient(self, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x``, whose values do not matter."""
        of_x: Tensor = self._backward(x, gradient, weight, None, (True, False, False))[0]
        return of_x

    def weight_gradients(
        self, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of weight and bias, whose values do not matter."""
        mask = (False, True, bias is not None)
        _, of_weight, of_bias = self._backward(x, gradient, weight, bias, mask)
        return of_weight, of_bias if bias is not None else None

    def _backward(
        self,
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
            weight.to(gradient.dtype),
            None if bias is None else bias.shape,
            self.stride,
            self.padding,
            self.dilation,
            False,  # not transposed
            (0,) * len(self.stride),  # padding of the output, for transposed ones
            self.groups,
            mask,
        )


Rule = _Linear | Convolution


def rule_of(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer with a stock forward, if there is one."""
    of: Any = layer
    if type(layer).forward is nn.Linear.forward:
        return LINEAR
    is_convolution = type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if is_convolution and of.padding_mode == "zeros" and not isinstance(of.padding, str):
        return Convolution(of.stride, of.padding, of.dilation, of.groups)
    return None


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix whose columns are its last dimension."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor.unsqueeze(0)
