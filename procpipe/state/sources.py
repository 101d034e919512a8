"""What files of weights hold, of every kind that can be read.

model.safetensors  pytorch_model.bin  any file of torch.save    one file
*.index.json                                                    several, with the keys of each
a folder with one of these
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch

from procpipe.errors import SavedStateError
from procpipe.state.values import Stored, read_torch

#: How Hugging Face names files of weights, those that are looked for first.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = (INDEX, SINGLE, "pytorch_model.bin.index.json", "pytorch_model.bin")


def values_in(path: Path) -> dict[str, Any]:
    """Return what a file or folder of weights holds, by key; a Stored for each tensor.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it is damaged, or of another kind.
    """
    if path.is_dir():
        path_of = (path / name for name in _NAMES if (path / name).is_file())
        if (found := next(path_of, None)) is None:
            raise FileNotFoundError(
                f"{path} holds none of {', '.join(_NAMES)} (state.load reads what state.save wrote)"
            )
        path = found
    if path.suffix != ".json":
        return _values_of(path)
    try:
        weight_map = dict(json.loads(path.read_bytes())["weight_map"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SavedStateError(f"{path}: it is no index of files of weights: {error}") from None
    values: dict[str, Any] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        there = _values_of(path.parent / name)
        values |= {key: there[key] for key in there if weight_map.get(key) == name}
    return values


def _values_of(path: Path) -> dict[str, Any]:
    """Return the values of one file by key."""
    if path.suffix == ".safetensors":
        try:
            tensors = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise SavedStateError(f"{path}: it is no whole file of safetensors: {error}") from None
        return {key: Stored.of(tensor) for key, tensor in tensors.items()}
    state = read_torch(path)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise SavedStateError(f"{path} holds a {type(state).__name__}, but no state dict")
    return state
