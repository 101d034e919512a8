"""Models of which only the shapes are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_INITIALIZE = (
    *("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_"),
    *("constant_", "ones_", "zeros_"),
)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Make modules on the meta device, and initialize none of their parameters.

    These have no values there, but each initialization would run its formula, for every parameter.
    """

    def unchanged(tensor: Tensor, *_: object, **__: object) -> Tensor:
        return tensor

    replaced: dict[str, Any] = dict.fromkeys(_INITIALIZE, unchanged)
    with torch.device("meta"), mock.patch.multiple(nn.init, **replaced):
        yield
