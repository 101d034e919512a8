"""Sizes as numbers that note what is computed from them.

    b, t, c = x.shape           three sizes
    x.view(b, t, 4, c // 4)     a size that is computed again for each micro-batch
    assert t <= 128             a decision, which is made once, and checked for each micro-batch

``bool()``, ``int()`` and ``range()`` need the value itself, so each is a decision, too. torch
accepts sizes of no other class than its ``SymInt``, so these are subclasses of it, whose methods
they replace.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from procpipe.cutting.refusal import refusal


class Notes(Protocol):
    """Where computations and decisions are noted."""

    def computed(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Return the number that a function of numbers returns."""

    def decided(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Return the plain value of a function of numbers, the same for each micro-batch."""


def _arithmetic(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def straight(self: Number, other: Any) -> Any:
        known = isinstance(other, int | float | Number)
        return self.notes.computed(function, self, other) if known else NotImplemented

    def reflected(self: Number, other: Any) -> Any:
        known = isinstance(other, int | float | Number)
        return self.notes.computed(function, other, self) if known else NotImplemented

    return straight, reflected


def _decision(function: Callable[..., Any]) -> Callable[..., Any]:
    def decide(self: Number, other: Any) -> Any:
        known = isinstance(other, int | float | Number)
        return self.notes.decided(function, self, other) if known else NotImplemented

    return decide


class Number:
    """A number of the sample, and the node that computes it for each micro-batch.

    Attributes:
        value: the sample's.
        source: the node.
        notes: where what is computed of it is noted.
    """

    def __init__(self, value: Any, source: fx.Node, notes: Notes) -> None:
        self.value, self.source, self.notes = value, source, notes

    @property
    def node(self) -> Any:
        """Refuse what torch would do with its own."""
        raise refusal("an operation on sizes is not known", "use int() of the size")

    __add__, __radd__ = _arithmetic(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul)
    __floordiv__, __rfloordiv__ = _arithmetic(operator.floordiv)
    __truediv__, __rtruediv__ = _arithmetic(operator.truediv)
    __mod__, __rmod__ = _arithmetic(operator.mod)
    __pow__, __rpow__ = _arithmetic(operator.pow)
    __lt__, __le__ = _decision(operator.lt), _decision(operator.le)
    __gt__, __ge__ = _decision(operator.gt), _decision(operator.ge)
    __eq__, __ne__ = _decision(operator.eq), _decision(operator.ne)

    # Python's int can be hashed. einops asks for a TypeError where a size is to stay one.
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Any:
        return self.notes.computed(operator.neg, self)

    def __abs__(self) -> Any:
        return self.notes.computed(abs, self)

    def __floor__(self) -> Any:
        return self.notes.computed(math.floor, self)

    def __ceil__(self) -> Any:
        return self.notes.computed(math.ceil, self)

    def __bool__(self) -> bool:
        return bool(self.notes.decided(bool, self))

    def __int__(self) -> int:
        return int(self.notes.decided(int, self))

    __index__ = __trunc__ = __int__

    def __float__(self) -> float:
        return float(self.notes.decided(float, self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.notes.decided(float, self), digits)

    def __repr__(self) -> str:
        return f"<size {self.value}>"  # for messages; no number, so that no code goes by it

    def __format__(self, form: str) -> str:
        return repr(self)

    __str__ = __repr__


class Size(Number, torch.SymInt):  # type: ignore[misc]
    """An int."""


class Ratio(Number, torch.SymFloat):  # type: ignore[misc]
    """A float."""
