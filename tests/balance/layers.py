"""Layers whose seconds are known, and the bytes of tensors."""

from __future__ import annotations

import torch
from torch import nn

from procpipe.balance.alone import as_flat, run_each
from procpipe.balance.profile import Counts, layer_seconds


class Clock:
    """A clock that only layers advance."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Taking(nn.Module):
    """Advances a clock by given times: one for each forward pass, and one for backward."""

    def __init__(self, clock, forward_s, backward_s):
        super().__init__()
        self.spend = iter(forward_s)
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.clock = clock

    def __deepcopy__(self, memo):
        return self  # so that the copy continues the same times

    def forward(self, x):
        self.clock.now += next(self.spend)
        return Delay.apply(x, self.clock, self.backward_s)


class Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward_s
        return gradient, None, None


def float32(*shape):
    return 4 * torch.Size(shape).numel()


def layer_times(module, sample, *, timeout=0.0, clock=None):
    """Return the seconds of each layer's forward and backward."""
    inputs, device, clock = as_flat(sample, module), torch.device("cpu"), clock or Clock()
    found = layer_seconds(module, inputs, device, timeout, clock)
    return [of_layer["F"] + of_layer["B"] for of_layer in found]


def held_bytes(module, sample, device="cpu"):
    """Return the bytes that each layer holds between its forward and its backward."""
    counted = run_each(module, as_flat(sample, module), torch.device(device), Counts().count)
    return [of_layer["held_bytes"] for of_layer in counted]
