"""The error for a forward that cannot be recorded, which names the line of the model's code."""

from __future__ import annotations

import inspect
import linecache
from pathlib import Path

import torch

_PYTHON, _TORCH, _OWN = (
    str(Path(str(m)).parent) for m in (inspect.__file__, torch.__file__, __file__)
)


class CannotCutError(ValueError):
    """A model whose forward cannot be recorded; says where, why, and what to do.

    No TypeError, which torch takes from an operator for "try the other operand".
    """


def line() -> str:
    """Return the line of the model's code that runs: ``model.py:12: x = x.view(b, -1)``."""
    frame = inspect.currentframe()
    while frame is not None and not _is_of_model(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def _is_of_model(file: str) -> bool:
    if file.startswith((_TORCH, _OWN)):
        return False
    return not file.startswith(_PYTHON) or "site-packages" in file


def refusal(why: str, instead: str) -> CannotCutError:
    """Return the error for the line that runs: what it does, and what to do instead."""
    return CannotCutError(f"{why}, in {line()}\n{instead}")
