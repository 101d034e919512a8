"""What can be saved: what ``torch.load(weights_only=True)`` loads; known before it is written."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Types whose values are saved as they are.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.Size),
)

CAN_BE = (
    "What can: numbers, text, bytes, dense tensors, lists, tuples, sets, dicts of these; and "
    "objects whose state_dict() is made of them"
)


def saved_form(name: str, value: Any, faults: list[str]) -> Any:
    """Return a value as it is saved; add to the faults why it cannot be.

    Lists, tuples, sets and dicts are new; tensors share the memory of those given, but for views,
    whose whole storage would be written. A number of NumPy becomes one of Python.
    """

    def refuse(fault: str) -> None:
        faults.append(f"{name} cannot be saved so that it can be loaded again: {fault}")

    def form(leaf: Any, place: str) -> Any:
        if type(leaf) in _PLAIN:
            return leaf
        if isinstance(leaf, Tensor):
            if fault := _fault_of(leaf):
                refuse(f"{place} {fault}")
                return None
            leaf = leaf.detach().resolve_conj().resolve_neg()
            is_view = leaf.untyped_storage().nbytes() != leaf.nbytes
            return leaf.to("cpu", copy=True) if is_view else leaf
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(leaf, numpy.generic):
            number = leaf.item()
            if type(number) in (bool, int, float, complex):
                return number
        refuse(f"{place} is a {type(leaf).__module__}.{type(leaf).__qualname__}")
        return None

    try:
        return _mapped(value, form, name)
    except RecursionError:
        refuse("it holds itself, or is nested too deeply")
        return None


def replaced(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return a nested value with the result of a function for each part of a kind."""
    return _mapped(value, lambda leaf, _: function(leaf) if isinstance(leaf, kind) else leaf)


def copied(value: Any) -> Any:
    """Return a saved form with copies of its tensors in this process's memory.

    Those of a GPU go to pinned memory, all at once; returns when they are there.
    """
    streams: set[Any] = set()

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True)
        streams.add(torch.cuda.current_stream(tensor.device))
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    found = replaced(value, Tensor, copy)
    for stream in streams:
        stream.synchronize()
    return found


def _mapped(value: Any, function: Callable[[Any, str], Any], place: str = "") -> Any:
    """Return a nested value with the results of a function of each leaf and its place."""
    kind: Any = type(value)
    if kind in (list, tuple, set):
        return kind(_mapped(item, function, f"{place}[{i}]") for i, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter):
        found = kind()
        for key, item in value.items():
            of_key = _mapped(key, function, f"the key {key!r:.50} of {place}")
            found[of_key] = _mapped(item, function, f"{place}[{key!r:.50}]")
        return found
    return function(value, place)


def _fault_of(tensor: Tensor) -> str:
    """Return why a tensor cannot be saved, or ""."""
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    if type(tensor) not in (Tensor, nn.Parameter) or not is_dense:
        kind = type(tensor).__name__
        return f"is a {kind} of {tensor.layout}: only ordinary dense tensors can be saved"
    return "is on the meta device, so it has no values" if tensor.is_meta else ""
