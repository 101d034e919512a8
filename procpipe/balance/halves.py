"""The weights' gradients that a split backward defers: counts their bytes, and leaves them out.

    x ──> Linear ──a──> LayerNorm ──> Linear ──b──> output
            │               │            │
            W               I            W              I: all gradients but those of W

A stage splits backward with its own nodes in the graph (``procpipe.compute.split``). Here the stock
layers run, and hooks find where the first half ends: at ``a`` and ``b``, at parameters of all other
layers, and at the inputs. What autograd computes to get there is the first half.

Hooks cannot see the projections inside attention: there the first half ends at the bias of query,
key and value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from procpipe.balance.profile import Memories

_STOCK = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@contextmanager
def noting_ends(module: nn.Module) -> Iterator[list[GradientEdge]]:
    """Collect where the first half of a backward ends, except at the inputs, during a forward."""
    layers, attentions = _put_off_by(module)
    put_off = {id(p) for layer in (*layers, *attentions) for p in layer.parameters()}
    ends = [
        get_gradient_edge(parameter)
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in put_off
    ]

    def note(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            ends.append(get_gradient_edge(output))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    for attention in attentions:
        bias = attention.in_proj_bias
        if bias is not None and bias.requires_grad:
            ends.append(get_gradient_edge(bias))
    try:
        yield ends
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def counting_put_off(module: nn.Module) -> Iterator[Memories]:
    """Collect what the weights' gradients of a module will need, during a forward.

    The gradient of an output is as large as the output.
    """
    found = Memories(())

    def add_one_like(output: Tensor) -> None:
        found.add(torch.empty(output.shape, dtype=output.dtype, device="meta"))

    def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.add(inputs[0])
        add_one_like(output)

    def note_attention(
        _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any], output: tuple[Tensor, ...]
    ) -> None:
        """Count query, key and value, their projections, and the last projection."""
        given = [*inputs[:3], *(named[name] for name in ("query", "key", "value") if name in named)]
        for each in given:
            found.add(each)
            add_one_like(each[..., :1].expand(*each.shape[:-1], output[0].shape[-1]))
        add_one_like(output[0])
        add_one_like(output[0])

    layers, attentions = _put_off_by(module)
    hooks = [layer.register_forward_hook(note) for layer in layers]
    hooks += [
        attention.register_forward_hook(note_attention, with_kwargs=True)
        for attention in attentions
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _put_off_by(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the linear and convolution layers, and the attentions, with deferred gradients."""
    layers: list[Any] = []
    attentions: list[Any] = []
    layer: Any
    for layer in module.modules():
        forward = type(layer).forward
        if any(forward is kind.forward for kind in _STOCK) and layer.weight.requires_grad:
            layers.append(layer)
        elif forward is nn.MultiheadAttention.forward and layer.out_proj.weight.requires_grad:
            attentions.append(layer)
    return layers, attentions
