"""Sizes as numbers that note in the graph what is computed from them.

    b, t, c = x.shape           three sizes
    x.view(b, t, 4, c // 4)     a size that is computed again for each micro-batch
    assert t <= 128             a decision, which is made once, and checked for each micro-batch

``int()`` and ``range()`` need the value itself, so each is a decision, too. torch accepts sizes of
no other class than its ``SymInt``, so these are subclasses of it, whose methods they replace.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from procpipe.cutting.refusal import must_be, refusal


class Number:
    """A number of the sample, and the node that computes it for each micro-batch."""

    def __init__(self, value: Any, source: fx.Node) -> None:
        self.value, self.source = value, source

    @property
    def node(self) -> Any:
        """Refuse what torch would do with its own."""
        raise refusal("an operation on sizes is not known", "use int() of the size")

    # Python's int can be hashed. einops asks for a TypeError where a size is to stay one.
    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        return int(must_be(self.source, self.value))

    __index__ = __trunc__ = __int__

    def __float__(self) -> float:
        return float(must_be(self.source, self.value))

    def __round__(self, digits: int | None = None) -> Any:
        return round(must_be(self.source, self.value), digits)

    def __repr__(self) -> str:
        return f"<size {self.value}>"  # for messages; no number, so that no code goes by it

    def __format__(self, form: str) -> str:
        return repr(self)

    __str__ = __repr__


class Size(Number, torch.SymInt):  # type: ignore[misc]
    """An int."""


class Ratio(Number, torch.SymFloat):  # type: ignore[misc]
    """A float."""


def _noting(function: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    """Return the method that computes a function of a number and of others, or decides by it."""

    def method(number: Number, *others: Any) -> Any:
        if not all(isinstance(other, int | float | Number) for other in others):
            return NotImplemented
        operands = (*others, number) if is_reflected else (number, *others)
        values = [n.value if isinstance(n, Number) else n for n in operands]
        sources = [n.source if isinstance(n, Number) else n for n in operands]
        node, value = number.source.graph.call_function(function, (*sources,)), function(*values)
        kind = {int: Size, float: Ratio}.get(type(value))
        return must_be(node, value) if kind is None else kind(value, node)

    return method


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _noting(getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _noting(getattr(operator, _name), is_reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs"):
    setattr(Number, f"__{_name}__", _noting(getattr(operator, _name)))
for _function in (math.floor, math.ceil, bool):
    setattr(Number, f"__{_function.__name__}__", _noting(_function))
