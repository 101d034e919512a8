"""Sizes as numbers that note in the graph what is computed from them.

    b, t, c = x.shape           three sizes
    x.view(b, t, 4, c // 4)     a size that is computed again for each micro-batch
    assert t <= 128             a decision, which is made once, and checked for each micro-batch

``int()`` and ``range()`` need the value itself, so each is a decision, too. torch accepts sizes of
no other class than its ``SymInt``, so these are subclasses of it, whose methods they replace.
"""

from __future__ import annotations

import inspect
import linecache
import math
import operator
import os
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import fx

_PYTHON, _TORCH, _OWN = (
    os.path.join(os.path.dirname(file), "") for file in (os.__file__, torch.__file__, __file__)
)
_NUMPY = os.path.join("site-packages", "numpy")

#: What to do about most errors.
WHOLE = (
    "let the module around it stay whole (whole=(ItsClass,)), move it into a module of its own, or "
    "switch it off by an option of the model"
)

SAMPLE = "give what a call of the model is given: procpipe.sequential(model, x)"

UNKNOWN = "an unknown line"


class CannotCutError(ValueError):
    """A model whose forward cannot be recorded; says where, why, and what to do.

    No TypeError, which torch takes from an operator for "try the other operand".
    """

    def __init__(self, why: str, instead: str = WHOLE, where: str = "") -> None:
        super().__init__(f"{why}, in {where or line()}\n{instead}")


def line_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first line of the model's code: ``model.py:12: x = x.view(b, -1)``."""
    for frame, number in frames:
        file = frame.f_code.co_filename
        is_pythons = file.startswith(_PYTHON) and "site-packages" not in file
        if not (is_pythons or file.startswith((_TORCH, _OWN)) or _NUMPY in file):
            return f"{file}:{number}: {linecache.getline(file, number).strip()}"
    return UNKNOWN


def line() -> str:
    """Return the line of the model's code that runs."""
    return line_of(traceback.walk_stack(inspect.currentframe()))


def must_be(node: fx.Node, value: Any) -> Any:
    """Have each micro-batch checked for a plain value of the sample, and return it."""
    node.graph.call_function(check, (node, value, line())).meta["keep"] = True
    return value


def check(found: Any, expected: Any, where: str) -> None:
    """Raise a ``ValueError`` if what was decided for the sample is wrong for this micro-batch."""
    if not (found is expected if isinstance(expected, bool) else found == expected):
        raise ValueError(
            f"the model's forward was recorded for a sample with {expected!r} here, and has "
            f"{found!r} now: {where}\n{WHOLE}; in place of len(x), write x.size(0)"
        )


class Number:
    """A number of the sample, and the node that computes it for each micro-batch."""

    def __init__(self, value: Any, source: fx.Node) -> None:
        self.value, self.source = value, source

    # Python's int can be hashed. einops asks for a TypeError where a size is to stay one.
    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        return int(must_be(self.source, self.value))

    __index__ = __trunc__ = __int__

    def __float__(self) -> float:
        return float(must_be(self.source, self.value))

    def __repr__(self) -> str:
        return f"<size {self.value}>"  # for messages; no number, so that no code goes by it

    def __format__(self, form: str) -> str:
        return repr(self)

    __str__ = __repr__


class Size(Number, torch.SymInt):  # type: ignore[misc]
    """An int."""


class Ratio(Number, torch.SymFloat):  # type: ignore[misc]
    """A float."""


def number(value: Any, node: fx.Node) -> Any:
    """Return what stands for the value of a node: a number, or a plain value that is checked."""
    kind = {int: Size, float: Ratio}.get(type(value))
    if kind is None:
        return must_be(node, value)
    node.meta["number"] = True
    return kind(value, node)


def _noting(function: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    """Return the method that computes a function of a number and of others, or decides by it."""

    def method(this: Number, *others: Any) -> Any:
        if not all(isinstance(other, int | float | Number) for other in others):
            return NotImplemented
        operands = (*others, this) if is_reflected else (this, *others)
        values = [n.value if isinstance(n, Number) else n for n in operands]
        sources = [n.source if isinstance(n, Number) else n for n in operands]
        return number(function(*values), this.source.graph.call_function(function, (*sources,)))

    return method


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _noting(getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _noting(getattr(operator, _name), is_reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs"):
    setattr(Number, f"__{_name}__", _noting(getattr(operator, _name)))
for _function in (math.floor, math.ceil, round, bool):
    setattr(Number, f"__{_function.__name__}__", _noting(_function))
