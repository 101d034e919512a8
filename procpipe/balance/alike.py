"""Says which layers cost the same, so that one of them is counted for all.

Models have many layers of one class with equal settings: the blocks of a language model. Their
bytes and FLOPs are determined by the class, the settings and the shapes of their tensors and
inputs. Their place in the model is a setting, too, which does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.skip.skippable import declared
from procpipe.tree import Flat

#: Attributes that hold the place of a layer in its model; children are parts of their own.
_PLACES = frozenset({"layer_idx", "_k", "_path", "_modules"})

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def likeness(module: nn.Module, inputs: Flat) -> Hashable:
    """Return what determines the bytes and FLOPs of a layer; None of one with skip tensors."""
    if any(declared(module)):
        return None
    parts = tuple(
        (re.sub(r"\d+", "#", name), type(part), _settings(vars(part)))
        for name, part in module.named_modules()
    )
    tensors = tuple(map(_settings, inputs.tensors))
    return parts, repr(inputs.structure), tensors, tuple(inputs.requires_grad)


def _settings(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, dict):
        return tuple((str(k), _settings(each)) for k, each in value.items() if k not in _PLACES)
    if isinstance(value, (tuple, list)):
        return tuple(map(_settings, value))
    if isinstance(value, partial):
        return _settings((value.func, value.args, value.keywords))
    return str(getattr(value, "__code__", type(value)))  # of a function, or another object
