"""Compiles the layers of a stage in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from procpipe.skip.skippable import declared
from procpipe.torch_internals import compile_in_place


def compile_layers(
    layers: Iterable[tuple[str, nn.Module]], options: Mapping[str, Any]
) -> list[str]:
    """Compile layers in place; return those that are left as they are, in words.

    A layer that stashes or pops skip tensors is a generator, which passes them to the pipeline:
    torch would compile it in pieces, anew for each micro-batch.
    """
    left_out = []
    for name, layer in layers:
        if any(declared(layer)):
            left_out.append(f"{name!r} ({type(layer).__name__})")
        else:
            compile_in_place(layer, options)
    return left_out
