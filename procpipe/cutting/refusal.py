"""The error for a forward that cannot be recorded, which names the line of the model's code."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback

import torch

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


def not_plain(value: object, what: str, instead: str = WHOLE) -> CannotCutError:
    """Return the error for an object that layers cannot pass on, and what is done with it."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return refusal(f"a value of type {kind} {what}, which is no tensor or plain value", instead)
