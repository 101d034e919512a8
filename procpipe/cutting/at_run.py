"""The functions that layers call beside the model's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from procpipe.torch_internals import pytree

#: ``(device type, dtype, enabled)``; of the recorded device, and otherwise of the present one.
Autocast = tuple[str | None, torch.dtype | None, bool]


def check(found: Any, expected: Any, where: str) -> None:
    """Raise a ``ValueError`` if what was decided for the sample is wrong for this micro-batch."""
    if not (found is expected if isinstance(expected, bool) else found == expected):
        raise ValueError(
            f"the model's forward was recorded for a sample with {expected!r} here, and has "
            f"{found!r} now: {where}"
        )


def check_mode(is_training: bool, recorded: bool, text: str) -> None:
    """Raise a ``ValueError`` if a layer is in the mode in which it is not the model's forward."""
    if is_training != recorded:
        raise ValueError(text)


def chosen(is_training: bool, in_training: Any, in_eval: Any) -> Any:
    """Return one of two values, which the model's forward has by its mode."""
    return in_training if is_training else in_eval


def carrier(device: torch.device, size: int) -> Tensor:
    """Return a tensor without elements whose shape is a size, so that sizes travel as tensors."""
    return torch.empty((size, 0), device=device)


@dataclass(frozen=True)
class Nested:
    """Makes what the model returns of its tensors and plain values."""

    tree: Any = field(hash=False)
    __name__ = "nested"

    def __call__(self, *leaves: Any) -> Any:
        """Return the leaves as they were nested in the sample's result."""
        return pytree.tree_unflatten(leaves, self.tree)


@dataclass(frozen=True)
class Within:
    """A function as it runs where the forward has switched gradients or autocast."""

    function: Callable[..., Any]
    is_grad: bool
    autocasts: tuple[Autocast, ...]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_within"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with ExitStack() as stack:
            if not self.is_grad:
                stack.enter_context(torch.no_grad())
            for device, dtype, enabled in self.autocasts:
                on = device or next(t.device.type for t in args if isinstance(t, Tensor))
                stack.enter_context(torch.autocast(on, dtype=dtype, enabled=enabled))
            return self.function(*args, **kwargs)


class Sizes:
    """Computes what depends on sizes alone, once for all micro-batches of the same sizes."""

    __name__ = "sizes"

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        self._function = function
        self._last: tuple[Any, tuple[Any, ...], list[int]] = (None, (), [])

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Return what depends on these tensors' sizes; the last result, if all is as it was."""
        # Changes of tensors that inference mode makes cannot be noticed.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._function(*tensors)
        device = tensors[0].device
        key = (
            device,
            type(tensors[0]),
            device.type != "meta" and torch.is_autocast_enabled(device.type),
            [tensor.shape for tensor in tensors],
        )
        last, values, versions = self._last
        if key != last or _versions(values) != versions:
            values = self._function(*tensors)
            self._last = key, values, _versions(values)
        return values


def _versions(values: tuple[Any, ...]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]
