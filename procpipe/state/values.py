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
    try:
        return _form(value, name, lambda fault: faults.append(_fault(name, fault)))
    except RecursionError:
        faults.append(_fault(name, "it holds itself, or is nested too deeply"))
        return None


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

    found = _mapped(value, copy)
    for stream in streams:
        stream.synchronize()
    return found


def _fault(name: str, fault: str) -> str:
    return f"{name} cannot be saved so that it can be loaded again: {fault}"


def _form(value: Any, place: str, refuse: Callable[[str], None]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _form_of_tensor(value, place, refuse)
    if kind in (list, tuple, set):
        return kind(_form(item, f"{place}[{i}]", refuse) for i, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter):
        found: Any = kind()
        for key, item in value.items():
            found[_form(key, f"the key {key!r:.50} of {place}", refuse)] = _form(
                item, f"{place}[{key!r:.50}]", refuse
            )
        return found
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        number = value.item()
        if type(number) in (bool, int, float, complex):
            return number
    refuse(f"{place} is a {kind.__module__}.{kind.__qualname__}")
    return None


def _form_of_tensor(value: Tensor, place: str, refuse: Callable[[str], None]) -> Tensor | None:
    is_dense = value.layout == torch.strided and not value.is_quantized
    if type(value) not in (Tensor, nn.Parameter) or not is_dense:
        refuse(
            f"{place} is a {type(value).__name__} of {value.layout}: only ordinary dense tensors "
            "can be saved"
        )
        return None
    if value.is_meta:
        refuse(f"{place} is on the meta device, so it has no values")
        return None
    value = value.detach().resolve_conj().resolve_neg()
    is_view = value.untyped_storage().nbytes() != value.nbytes
    return value.to("cpu", copy=True) if is_view else value


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a saved form with a function of each of its tensors."""
    kind = type(value)
    if isinstance(value, Tensor):
        return function(value)
    if kind in (list, tuple, set):
        return kind(_mapped(item, function) for item in value)
    if kind in (dict, OrderedDict, Counter):
        found: Any = kind()
        for key, item in value.items():
            found[key] = _mapped(item, function)
        return found
    return value
