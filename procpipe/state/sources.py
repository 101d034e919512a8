"""What files of weights hold, of every kind that can be read: where each tensor is, and its shape.

model.safetensors  pytorch_model.bin  any file of torch.save    one file
*.index.json                                                    several, with the keys of each
a folder with one of these, or with what ``save`` wrote
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procpipe.errors import SavedStateError
from procpipe.state.archives import read_archive
from procpipe.state.files import Index, naming, open_regular, read_index
from procpipe.state.folders import find
from procpipe.state.pieces import Place, read_header

#: How Hugging Face names files of weights, those that are looked for first.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = (INDEX, SINGLE, "pytorch_model.bin.index.json", "pytorch_model.bin")

#: By key, the shape of a tensor and its dtype, where it is known; None for any other value.
Shapes = dict[str, "tuple[tuple[int, ...], torch.dtype | None] | None"]


@dataclass(frozen=True)
class Source:
    """What a file or folder holds."""

    shapes: Shapes  # of its values by key
    #: ``read(into)`` returns the values of the keys of ``into``, each in the tensor that it has for
    #: the key, if any.
    read: Callable[[Mapping[str, Tensor | None]], dict[str, Any]]
    is_own: bool = False  # whether ``save`` wrote it, under the model's own keys


def open_source(path: Path) -> Source:
    """Look into a file or folder of weights.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it is damaged, of another kind, or names files outside of its folder.
    """
    if path.is_dir():
        if (entry := find(path)) is not None:
            return source_of(read_index(entry.path))
        for name in _NAMES:
            if (path / name).is_file():
                return open_source(path / name)
        raise FileNotFoundError(
            f"{path} holds neither a saved state nor {SINGLE} nor any of {', '.join(_NAMES)}"
        )
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    if path.suffix != ".json":
        return _of_values(_values_in(path))
    values: dict[str, Any] = {}
    for file, keys in sorted(_files_of_index(path).items()):
        there = _values_in(file)
        if missing := set(keys).difference(there):
            raise SavedStateError(
                f"{file}: {min(missing)} is not in it, where the index says it is"
            )
        values |= {key: there[key] for key in keys}
    return _of_values(values)


def source_of(index: Index) -> Source:
    """Return the weights of a saved state, under the model's own keys."""

    def read(into: Mapping[str, Tensor | None]) -> dict[str, Any]:
        tensors = {f"model.{key}": value for key, value in into.items() if value is not None}
        return under("model.", index.read([f"model.{key}" for key in into], tensors))

    return Source(under("model.", index.shapes), read, "procpipe" in index.shapes)


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose keys begin with a prefix, without it."""
    return {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)
    }


def _of_values(values: dict[str, Any]) -> Source:
    def read_one(value: Any, into: Tensor | None) -> Any:
        if isinstance(value, Place):
            return value.read(into)
        return value if into is None else into.copy_(value)

    shapes: Shapes = {
        key: (tuple(value.shape), value.dtype) if isinstance(value, Place | Tensor) else None
        for key, value in values.items()
    }
    return Source(shapes, lambda into: {key: read_one(values[key], into[key]) for key in into})


def _values_in(path: Path) -> dict[str, Any]:
    """Return the values of one file by key; of tensors the places, if each is in one piece."""
    if path.suffix == ".safetensors":
        return dict(read_header(path))
    with naming(path):
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise SavedStateError("it is empty")
            # Private pages, read when they are used; writing to them would not change the file.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        state = read_archive(memoryview(data))
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise SavedStateError(f"{path} holds a {type(state).__name__}, but no state dict")
    start = torch.frombuffer(data, dtype=torch.uint8, count=1).data_ptr()

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_contiguous():
            return value  # a tensor in the file's memory, which stays mapped
        offset = value.data_ptr() - start
        is_in_file = 0 <= offset < size and value.numel()
        return Place(path, offset, value.dtype, tuple(value.shape)) if is_in_file else value

    return {key: place(value) for key, value in state.items()}


def _files_of_index(path: Path) -> dict[Path, list[str]]:
    """Return the files beside an index as Hugging Face makes it, and the keys each must have."""
    with naming(path):
        with open_regular(path) as file:
            data = file.read()
        try:
            weight_map = dict(json.loads(data)["weight_map"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SavedStateError(f"it is not an index of files of weights: {error}") from None
        keys_of: dict[Path, list[str]] = {}
        for key, name in weight_map.items():
            # It may be a link: Hugging Face's cache links to files elsewhere.
            if type(name) is not str or ".." in Path(name).parts or Path(name).is_absolute():
                raise SavedStateError(f"{key} is in {name!r}, which is not in the index's folder")
            keys_of.setdefault(path.parent / name, []).append(key)
    return keys_of
