"""Makes an ``nn.MultiheadAttention.forward`` that calls another function than ``F.linear``.

The layer calls functions of ``torch.nn.functional``, which look up ``linear`` in their globals. To
replace it there would affect all code. So private copies of the functions look up some names in
other globals:

    copy of MultiheadAttention.forward          F ──> torch.nn.functional, but for (1)
    (1) copy of F.multi_head_attention_forward  linear ──> ours, and (2)
    (2) copies of F._in_projection_packed       linear ──> ours
        and F._in_projection

All other names are looked up in torch at each call, so replaced ones are used too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import activation

from procpipe.torch_internals import IN_PROJECTIONS, IS_TESTED

#: ``linear(input, weight, bias)``.
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

#: The functions (2) and (1), with the names that their copies look up elsewhere:
#: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/functional.py
_ATTENTION = "multi_head_attention_forward"
_USES = {name: {"linear"} for name in IN_PROJECTIONS} | {_ATTENTION: {"linear", *IN_PROJECTIONS}}


def is_known() -> bool:
    """Return whether this torch is tested, and its functions are as drawn above."""
    forward = nn.MultiheadAttention.forward
    return (
        IS_TESTED
        and _uses(forward, {"F", _ATTENTION}, vars(activation))
        and vars(activation).get("F") is F
        and all(_uses(vars(F).get(name), _USES[name], vars(F)) for name in _USES)
    )


def attention_with(linear: Linear) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a copy of ``nn.MultiheadAttention.forward`` that calls this ``linear``.

    It gets the layer's parameters, or views of them, as weight and bias.
    """
    assert is_known(), "check first"
    names = _Names({"linear": linear}, vars(F))
    for name in _USES:
        names[name] = _copy(getattr(F, name), names)
    functional = _Functional()
    setattr(functional, _ATTENTION, names[_ATTENTION])
    return _copy(nn.MultiheadAttention.forward, _Names({"F": functional}, vars(activation)))


class _Functional:
    """``torch.nn.functional`` with other attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


class _Names(dict[str, Any]):
    """A function's globals; names that are not here are looked up in others."""

    def __init__(self, names: dict[str, Any], others: dict[str, Any]) -> None:
        super().__init__(names)
        self._others = others

    def __missing__(self, name: str) -> Any:
        return self._others[name]  # after a KeyError Python looks into the builtins


def _copy(function: Any, names: _Names) -> FunctionType:
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _uses(function: object, names: set[str], globals_: dict[str, Any]) -> bool:
    """Return whether a function is Python's, and looks names up among these globals when called."""
    return (
        isinstance(function, FunctionType)
        and function.__globals__ is globals_
        and names <= set(function.__code__.co_names)
    )
