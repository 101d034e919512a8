"""The functions that layers call beside the model's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

#: ``(device type, dtype, enabled)``; of the recorded device, and otherwise of the present one.
Autocast = tuple[str | None, torch.dtype | None, bool]


def check(holds: bool, text: str) -> None:
    """Raise a ``ValueError`` if what was decided for the sample is wrong for this micro-batch."""
    if not holds:
        raise ValueError(text)


def check_dtype(tensor: Tensor, dtype: torch.dtype, text: str) -> None:
    """Raise a ``TypeError`` if a tensor has another dtype than the sample's had."""
    if tensor.dtype != dtype:
        raise TypeError(f"{text}: it was {dtype}, and is {tensor.dtype}")


def chosen(is_training: bool, in_training: Any, in_eval: Any) -> Any:
    """Return one of two values, which the model's forward has by its mode."""
    return in_training if is_training else in_eval


def carrier(device: torch.device, size: int) -> Tensor:
    """Return a tensor without elements whose shape is a size, so that sizes travel as tensors."""
    return torch.empty((size, 0), device=device)


def within(
    function: Callable[..., Any], is_grad: bool, autocasts: tuple[Autocast, ...]
) -> Callable[..., Any]:
    """Return a function as it runs where the forward has switched gradients or autocast."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if not is_grad:
                stack.enter_context(torch.no_grad())
            for device, dtype, enabled in autocasts:
                on = device or next(t.device.type for t in args if isinstance(t, Tensor))
                stack.enter_context(torch.autocast(on, dtype=dtype, enabled=enabled))
            return function(*args, **kwargs)

    name = getattr(function, "__name__", type(function).__name__)
    run.__name__ = run.__qualname__ = f"{name}_within"
    return run


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module, or anything else."""
    return function(*args, **kwargs)
