"""What can be saved, known before it is written; and tensors in files, mapped into memory."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.errors import SavedStateError

#: Types whose values are saved as they are.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.Size),
)

CAN_BE = (
    "What can: numbers, text, bytes, dense tensors, lists, tuples, sets, dicts of these; and "
    "objects whose state_dict() is made of them"
)


# -- to files ------------------------------------------------------------------------------------


def saved_form(name: str, value: Any, faults: list[str]) -> Any:
    """Return a value as ``torch.load(weights_only=True)`` loads it; or note why it cannot be saved.

    Lists, tuples, sets and dicts are new; tensors share the memory of those given, but for views,
    whose whole storage would be written. A number of NumPy becomes one of Python.
    """

    def form(leaf: Any, place: str) -> Any:
        if type(leaf) in _PLAIN:
            return leaf
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(leaf, (numpy.number, numpy.bool_)):
            number = leaf.item()
            if type(number) in _PLAIN:
                return number
        if fault := _fault_of(leaf):
            faults.append(f"{name} cannot be saved so that it can be loaded again: {place} {fault}")
            return None
        tensor = leaf.detach().resolve_conj().resolve_neg()
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        return tensor.to("cpu", copy=True) if is_view else tensor

    try:
        return mapped(value, form, name)
    except RecursionError:
        faults.append(f"{name} cannot be saved so that it can be loaded again: it holds itself")


def _fault_of(leaf: Any) -> str:
    """Return why what is not plain cannot be saved, or ""."""
    if not isinstance(leaf, Tensor):
        return f"is a {type(leaf).__module__}.{type(leaf).__qualname__}"
    is_dense = leaf.layout == torch.strided and not leaf.is_quantized
    if type(leaf) not in (Tensor, nn.Parameter) or not is_dense:
        kind = type(leaf).__name__
        return f"is a {kind} of {leaf.layout}: only ordinary dense tensors can be saved"
    return "is on the meta device, so it has no values" if leaf.is_meta else ""


def copied(value: Any) -> Any:
    """Return a saved form with copies of its tensors in host memory; of a GPU's, in pinned."""

    def copy(tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return host.copy_(tensor)

    return replaced(value, Tensor, copy)


def replaced(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return a nested value with the result of a function for each part of a kind."""
    return mapped(value, lambda leaf, _: function(leaf) if isinstance(leaf, kind) else leaf)


def mapped(value: Any, function: Callable[[Any, str], Any], place: str = "") -> Any:
    """Return a nested value with the results of a function of each leaf and its place."""
    kind: Any = type(value)
    if kind in (list, tuple, set):
        return kind(mapped(item, function, f"{place}[{i}]") for i, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter):
        found = kind()
        for key, item in value.items():
            of_key = mapped(key, function, f"the key {key!r:.50} of {place}")
            found[of_key] = mapped(item, function, f"{place}[{key!r:.50}]")
        return found
    return function(value, place)


# -- from files ----------------------------------------------------------------------------------


class Stored:
    """A tensor in files that are mapped into memory: ``get`` returns it, to be copied at once.

    Mapped memory is the file's: the system takes it back as it needs it. So a process that loads
    holds no more than one tensor beside its own.
    """

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, get: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self.get = tuple(shape), dtype, get

    @classmethod
    def of(cls, tensor: Tensor) -> Stored:
        """Return a mapped tensor as one."""
        return cls(tensor.shape, tensor.dtype, lambda: tensor)

    def copy(self) -> Tensor:
        """Return it in memory of its own, on the CPU."""
        return self.get().clone()


def read_torch(path: Path) -> Any:
    """Return what a file of ``torch.save`` holds, with a Stored for each tensor.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it is damaged, of another kind, or ``weights_only=True`` refuses it.
    """
    with open(path, "rb") as file:
        is_archive = file.read(2) == b"PK"  # others, of torch before 1.6, cannot be mapped
    try:
        found = torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except Exception as error:  # of many kinds, where bytes are damaged
        raise SavedStateError(
            f"{path}: it is no whole file of torch.save that weights_only=True reads: {error}"
        ) from None
    return replaced(found, Tensor, Stored.of)
