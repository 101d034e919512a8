"""Counts the bytes that weights' gradients which a split backward defers will need.

    x ──> Linear ──a──> LayerNorm ──> Linear ──b──> output       x, a's gradient, and likewise at
            │               │            │                       the second Linear
            W               I            W

A stage splits backward with its own nodes in the graph (``procpipe.compute.split``), which tensors
without values cannot go through. So here the stock layers run, with hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.balance.profile import Memories
from procpipe.compute.split.splitter import suited


@contextmanager
def counting_put_off(module: nn.Module) -> Iterator[Memories]:
    """Collect what the weights' gradients of a module will need, during a forward.

    That is the input and the gradient of the output, which is as large as the output; of an
    attention, those of the projections of query, key and value, and of the last one.
    """
    found = Memories(())

    def note(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        names = ("input", "query", "key", "value")
        inputs = [*given[:3], *(named[name] for name in names if name in named)]
        for tensor in inputs:
            found.add(tensor)
        outputs = [output]
        if isinstance(layer, nn.MultiheadAttention):
            last, _ = output
            projected = (x[..., :1].expand(*x.shape[:-1], last.shape[-1]) for x in inputs)
            outputs = [*projected, last, last]
        for tensor in outputs:
            found.add(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))

    hooks = [
        layer.register_forward_hook(note, with_kwargs=True)
        for layer in suited([module])
        if _weight_of(layer).requires_grad
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _weight_of(layer: Any) -> Tensor:
    of = layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer
    weight: Tensor = of.weight
    return weight
