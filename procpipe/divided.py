"""A model whose layers procpipe has made: by ``procpipe.sequential`` or ``hf.sequential``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Divided(nn.Sequential):
    """An ``nn.Sequential`` which takes what the model takes.

    Attributes:
        sample: an input without values, from which a balance is estimated.
        keys: returns the model's key for a key of this one.
    """

    sample: tuple[Any, ...] | dict[str, Any]
    keys: Callable[[str], str]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the model returns."""
        first, *others = self
        value = first(*inputs, **named)
        for layer in others:
            value = layer(value)
        return value
