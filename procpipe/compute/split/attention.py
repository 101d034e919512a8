"""``nn.MultiheadAttention``, with the weights applied by another function than ``linear``.

The layer calls no other layer: functions of ``torch.nn.functional`` apply its weights, by a
``linear`` that is a name among their globals. To change it there would change it for everybody. So
private copies are made of the functions, which find some names elsewhere:

    copy of MultiheadAttention.forward          F ──> torch.nn.functional, but for (1)
    (1) copy of F.multi_head_attention_forward  linear ──> ours, and (2)
    (2) copies of F._in_projection_packed       linear ──> ours
        and F._in_projection

All other names are what they are in torch at the time of a call, also where someone replaced them.

Knows nothing of what the other function does, nor why.
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

#: What calls ``linear``, (2) and (1), with the names it uses that are found elsewhere:
#: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/functional.py
_ATTENTION = "multi_head_attention_forward"
_USES = {name: {"linear"} for name in IN_PROJECTIONS} | {_ATTENTION: {"linear", *IN_PROJECTIONS}}


def is_known() -> bool:
    """Tell whether this torch is tested and built as drawn above, and nobody changed that."""
    forward = nn.MultiheadAttention.forward
    return (
        IS_TESTED
        and _uses(forward, {"F", _ATTENTION}, vars(activation))
        and vars(activation).get("F") is F
        and all(_uses(vars(F).get(name), _USES[name], vars(F)) for name in _USES)
    )


def attention_with(linear: Linear) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a copy of ``nn.MultiheadAttention.forward`` which applies weights by ``linear``.

    Args:
        linear: what to call for ``torch.nn.functional.linear``. Weight and bias are the layer's
            parameters, or views of them.
    """
    assert is_known(), "ask first"
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
    """A function's globals, looked up in others where they are not in these."""

    def __init__(self, names: dict[str, Any], others: dict[str, Any]) -> None:
        super().__init__(names)
        self._others = others

    def __missing__(self, name: str) -> Any:
        return self._others[name]  # a KeyError sends Python on to the builtins


def _copy(function: Any, names: _Names) -> FunctionType:
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _uses(function: object, names: set[str], globals_: dict[str, Any]) -> bool:
    """Tell whether a function is Python's, and looks names up among these globals when called."""
    return (
        isinstance(function, FunctionType)
        and function.__globals__ is globals_
        and names <= set(function.__code__.co_names)
    )
