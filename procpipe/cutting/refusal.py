"""The errors that name a line of the model's code: when it is recorded, and when it runs."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from typing import Any

import torch
from torch import fx

_PYTHON, _TORCH, _OWN = (os.path.dirname(file) for file in (os.__file__, torch.__file__, __file__))

#: What to do about most refusals.
WHOLE = "let the module around it stay whole (whole=(ItsClass,)), or move it into one of its own"


class CannotCutError(ValueError):
    """A model whose forward cannot be recorded; says where, why, and what to do.

    No TypeError, which torch takes from an operator for "try the other operand".
    """


def line() -> str:
    """Return the line of the model's code that runs: ``model.py:12: x = x.view(b, -1)``."""
    for frame, number in traceback.walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        is_pythons = file.startswith(_PYTHON) and "site-packages" not in file
        if not (is_pythons or file.startswith((_TORCH, _OWN))):
            return f"{file}:{number}: {linecache.getline(file, number).strip()}"
    return "an unknown line"


def refusal(why: str, instead: str = WHOLE) -> CannotCutError:
    """Return the error for the line that runs: what it does, and what to do instead."""
    return CannotCutError(f"{why}, in {line()}\n{instead}")


def must_be(node: fx.Node, value: Any) -> Any:
    """Have each micro-batch checked for a plain value of the sample, and return it."""
    arguments = (node, value, f"{line()}\n{WHOLE}")
    node.graph.call_function(check, arguments).meta["keep"] = True
    return value


def check(found: Any, expected: Any, where: str) -> None:
    """Raise a ``ValueError`` if what was decided for the sample is wrong for this micro-batch."""
    if not (found is expected if isinstance(expected, bool) else found == expected):
        raise ValueError(
            f"the model's forward was recorded for a sample with {expected!r} here, and has "
            f"{found!r} now: {where}"
        )
