"""What files of weights hold, of every kind that can be read.

model.safetensors  pytorch_model.bin  any file of torch.save    one file
*.index.json                                                    several, with the keys of each
a folder with one of these, or with what ``save`` wrote

All are mapped: a tensor is read when it is copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procpipe.errors import SavedStateError
from procpipe.state import files, sharded
from procpipe.state.mapped import Mapped
from procpipe.state.values import copied

#: How Hugging Face names files of weights, those that are looked for first.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = (INDEX, SINGLE, "pytorch_model.bin.index.json", "pytorch_model.bin")

#: By key, the shape of a tensor and its dtype; None for any other value.
Shapes = dict[str, "tuple[tuple[int, ...], torch.dtype] | None"]


@dataclass(frozen=True)
class Source:
    """What a file or folder holds."""

    values: Mapping[str, Any]  # by key
    mapped: Mapped  # where they are
    is_own: bool = False  # whether ``save`` wrote it, under the model's own keys

    @property
    def shapes(self) -> Shapes:
        """The shape and dtype of each tensor."""
        return {
            key: (tuple(value.shape), value.dtype)
            if isinstance(value, (Tensor, sharded.Shards))
            else None
            for key, value in self.values.items()
        }

    def read(self, into: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Return the values of the keys of ``into``, each in the tensor that it has for it, if any.

        A tensor may be of any dtype and on any device.
        """
        return {key: self._read_one(self.values[key], target) for key, target in into.items()}

    def _read_one(self, value: Any, target: Tensor | None) -> Any:
        if not isinstance(value, (Tensor, sharded.Shards)):
            return copied(value)
        target = torch.empty(value.shape, dtype=value.dtype) if target is None else target
        if isinstance(value, Tensor):
            self.mapped.copy(value, target)
        else:
            value.copy_into(target, self.mapped)
        return target


def open_source(path: Path) -> Source:
    """Look into a file or folder of weights.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it is damaged, of another kind, or names files outside of its folder.
    """
    mapped = Mapped()
    if path.is_dir():
        if (entry := files.find(path)) is not None:
            return source_of(files.read(entry.path, mapped), mapped)
        for name in _NAMES:
            if (path / name).is_file():
                return open_source(path / name)
        raise FileNotFoundError(
            f"{path} holds neither a saved state nor {SINGLE} nor any of {', '.join(_NAMES)}"
        )
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    if path.suffix != ".json":
        return Source(_values_in(path, mapped), mapped)
    values: dict[str, Any] = {}
    for file, keys in sorted(_files_of_index(path).items()):
        there = _values_in(file, mapped)
        if missing := set(keys).difference(there):
            raise SavedStateError(
                f"{file}: {min(missing)} is not in it, where the index says it is"
            )
        values |= {key: there[key] for key in keys}
    return Source(values, mapped)


def source_of(contents: Sequence[Mapping[str, Any]], mapped: Mapped) -> Source:
    """Return the weights of a saved state, under the model's own keys."""
    model = sharded.merged(of_rank["model"] for of_rank in contents)
    return Source(model, mapped, is_own=True)


def _values_in(path: Path, mapped: Mapped) -> dict[str, Any]:
    """Return the values of one file by key."""
    if not path.is_file():
        raise SavedStateError(
            f"{path} is missing, or is no file: was the folder copied as a whole?"
        )
    if path.suffix == ".safetensors":
        opened = mapped.open_safetensors(path)
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - no dict
    state = mapped.open_torch(path)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise SavedStateError(f"{path} holds a {type(state).__name__}, but no state dict")
    return state


def _files_of_index(path: Path) -> dict[Path, list[str]]:
    """Return the files beside an index as Hugging Face makes it, and the keys each must have."""
    try:
        weight_map = dict(json.loads(path.read_bytes())["weight_map"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SavedStateError(f"{path}: it is no index of files of weights: {error}") from None
    keys_of: dict[Path, list[str]] = {}
    for key, name in weight_map.items():
        # It may be a link: Hugging Face's cache links to files elsewhere.
        if type(name) is not str or ".." in Path(name).parts or Path(name).is_absolute():
            raise SavedStateError(
                f"{path}: {key} is in {name!r}, which is not in the index's folder"
            )
        keys_of.setdefault(path.parent / name, []).append(key)
    return keys_of
