"""Reads and writes parameters and buffers alone, in formats that other programs share.

No process holds more than its own stage: a file is mapped into memory, or read key by key.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.errors import SavedStateError
from procpipe.state.archives import read_archive
from procpipe.state.files import METADATA, naming, open_regular, read_index
from procpipe.state.folders import find
from procpipe.state.keys import FileKeys, Keys, advice, collisions, few
from procpipe.state.member import Member, raise_faults

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

#: By key, the shape of a tensor and its dtype, where it is known; None for any other value.
Shapes = dict[str, "tuple[tuple[int, ...], torch.dtype | None] | None"]

#: The names of dtypes in safetensors, where they differ from torch's.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def load_weights(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    keys: Keys | None = None,
    strict: bool = True,
) -> None:
    """Load parameters and buffers from a file, in the full model's keys or in others.

    Every rank calls it, and reads only its own stage's. Values of another dtype are converted,
    unless more than precision would be lost (complex to real, say). Nothing in a file is executed.

    Args:
        path: a state dict that ``torch.save`` wrote; a ``.safetensors`` file; a folder of such, as
            :func:`export` and Hugging Face make it, or its index; or what ``save`` wrote.
        module: the stage; or any module with these keys.
        keys: what each key of the full model is called in the file: a function ``str -> str``; or
            pairs of a regular expression and a replacement, which ``re.sub`` applies one after the
            other (``[("^", "model.")]``). By default the attribute ``keys`` of the
            ``nn.Sequential`` (that the stage was built from), if it has one; ``[]`` for the model's
            own keys. What ``save`` wrote has the model's own keys by default.
        strict: refuse keys that are missing or left over. A parameter that the model has under
            several names is not missing if the file has one of them.

    Raises:
        FileNotFoundError: there is no such file, on some rank.
        TypeError: ``keys`` is neither of these, or returns no str.
        ValueError: lists the faults on every rank, the first of each kind: missing and unexpected
            keys, other shapes, a key in the file for two tensors. If all keys differ only by a
            prefix, it says which. Or ``keys`` holds what is no regular expression.
        SavedStateError: a file is damaged, of another kind, or names files outside of its folder.
        ImportError: the file needs the package safetensors, which is not installed.
        RemoteStageError: another rank failed.

    Source: ``torch.nn.Module.load_state_dict``.
    """
    with Member.of(module).call("state.load_weights") as agree:
        source = open_source(Path(path))
        file_keys = FileKeys.of(module, () if keys is None and source.is_own else keys)

        def all_faults_and_advice(facts: list[dict[str, Any]]) -> list[str]:
            named = [value for of_rank in facts for value in of_rank["keys"]]
            faults = collisions(named) + all_faults(facts, source.shapes, strict=strict)
            return (advice(named, source.shapes) if faults else []) + faults

        faults = agree(
            {
                "keys": file_keys.facts(),
                "faults": weights_faults(module, file_keys, source.shapes, strict=strict),
            },
            all_faults_and_advice,
        )
        if not faults:
            ours = module.state_dict()
            with torch.no_grad():
                for key, name in file_keys.to_read(source.shapes).items():
                    value = source.read(name)
                    if isinstance(ours[key], Tensor):  # into the model's memory, one by one
                        ours[key].copy_(value)
                    else:
                        ours[key] = value
            module.load_state_dict(ours)
            agree(None, lambda _: None)  # no rank goes on before all have read
    raise_faults(f"the weights in {path} do not fit", faults)


def export(path: str | os.PathLike[str], module: nn.Module, *, keys: Keys | None = None) -> None:
    """Write parameters and buffers as safetensors, in the full model's keys or in others.

    Every rank calls it, and returns once all have written. The folder is laid out as Hugging Face
    does it: several stages make ``model-00001-of-00003.safetensors``, …, and
    ``model.safetensors.index.json``; one makes ``model.safetensors``.

    Args:
        path: a folder that is empty, or not there yet; shared by all ranks.
        module: the stage; or any module.
        keys: what each key of the full model is to be called; see :func:`load_weights`, which reads
            the files again with the same ``keys``. Names of one parameter may become one key.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: different tensors would get one key.
        ImportError: the package safetensors is not installed (``pip install
            'procpipe[safetensors]'``).
        TypeError: the module's state dict holds more than tensors.
        RemoteStageError: another rank failed.

    Source: the package ``safetensors``; ``huggingface_hub.save_torch_state_dict``.
    """
    member = Member.of(module)
    rank, num_ranks = member.rank, member.num_ranks
    with member.call("state.export") as agree:
        safetensors = _safetensors()
        file_keys = FileKeys.of(module, keys)

        def make_folder(facts: list[Any]) -> dict[str, Any]:
            faults = collisions(chain.from_iterable(facts))
            folder = Path(path).absolute()
            if not faults:
                folder.mkdir(parents=True, exist_ok=True)
                if any(folder.iterdir()):
                    raise FileExistsError(f"{folder} is not empty: export to a new folder")
            return {"faults": faults, "folder": str(folder)}

        def write_index(parts: list[Any]) -> None:
            if num_ranks > 1:
                weight_map = {key: file for file, names, _ in parts for key in names}
                size = sum(num_bytes for _, _, num_bytes in parts)
                text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
                (folder / f"{_INDEX}.tmp").write_text(text)
                os.rename(folder / f"{_INDEX}.tmp", folder / _INDEX)

        agreed = agree(file_keys.facts(), make_folder)
        folder = Path(agreed["folder"])
        if not agreed["faults"]:
            tensors = _separate(module, file_keys)
            one_of_several = f"model-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"
            name = _SINGLE if num_ranks == 1 else one_of_several
            safetensors.save_file(tensors, folder / name, metadata={"format": "pt"})
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            agree([name, list(tensors), num_bytes], write_index)
    raise_faults(f"nothing was written to {path}", agreed["faults"])


# -- what does not fit ---------------------------------------------------------------------------


def weights_faults(
    module: nn.Module,
    keys: FileKeys,
    saved: Shapes,
    *,
    strict: bool,
    must_be_same_dtype: bool = False,
) -> list[str]:
    """Return what a module lacks, and what has another shape, or a dtype that does not fit."""
    layers = dict(module.named_children())
    to_read = keys.to_read(saved)
    missing, unfit = [], []
    for key, value in module.state_dict().items():
        layer = key.partition(".")[0]
        where = f"layer {layer!r} ({type(layers[layer]).__qualname__}): " if layer in layers else ""
        name = to_read.get(key, keys.own[key])
        where += key if name == key else f"{key} ({name} in the file)"
        if isinstance(value, Tensor) and value.is_meta:
            unfit.append(f"{where} is on the meta device: give it memory first (to_empty)")
        elif key not in to_read:
            missing.append(f"{where} is missing")
        elif isinstance(value, Tensor):
            shape, dtype = saved[name] or (None, None)
            if shape != tuple(value.shape):
                told = "is no tensor" if shape is None else f"has shape {shape}"
                unfit.append(f"{where} has shape {tuple(value.shape)} but {told} there")
            elif dtype is not None and not _fits(dtype, value.dtype, must_be_same_dtype):
                unfit.append(f"{where} has dtype {value.dtype} but {dtype} there")
    return (few(missing) if strict else []) + few(unfit)


def all_faults(facts: list[dict[str, Any]], saved: Iterable[str], *, strict: bool) -> list[str]:
    """Return the faults of all ranks, from the ``keys`` and ``faults`` of each; unused keys too."""
    known = {name for of_rank in facts for _, name, _ in of_rank["keys"]}
    faults = [
        (f"rank {rank}: " if len(facts) > 1 else "") + fault
        for rank, of_rank in enumerate(facts)
        for fault in of_rank["faults"]
    ]
    unexpected = [key for key in saved if key not in known] if strict else []
    return faults + few(f"{key} is there, but no layer of the model has it" for key in unexpected)


def under(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values whose keys begin with a prefix, without it."""
    return {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)
    }


# -- files that hold weights ---------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Files of weights.

    Attributes:
        shapes: of what is in them.
        read: returns the value of a key.
        is_own: whether ``save`` wrote it, under the model's own keys.
    """

    shapes: Shapes
    read: Callable[[str], Any]
    is_own: bool = False


def open_source(path: Path) -> Source:
    """Look into a file or folder of weights."""
    if path.is_dir():
        if (entry := find(path, None, METADATA)) is not None:
            return _open_saved_state(entry.path)
        for name in (_INDEX, _SINGLE):
            if (path / name).is_file():
                return open_source(path / name)
        raise FileNotFoundError(f"{path} holds neither a saved state nor {_SINGLE} nor {_INDEX}")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    if path.suffix == ".json":
        return _open_safetensors(_files_of_index(path))
    if path.suffix == ".safetensors":
        return _open_safetensors({path: None})
    return _open_torch_file(path)


def _open_torch_file(path: Path) -> Source:

    with naming(path):
        with open_regular(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise SavedStateError("it is empty")
            # Private pages, read when they are used; writing to them would not change the file.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        state = read_archive(memoryview(data))
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise SavedStateError(f"{path} holds a {type(state).__name__}, but no state dict")
    return Source({key: _shape_of(value) for key, value in state.items()}, state.__getitem__)


def _files_of_index(path: Path) -> dict[Path, list[str] | None]:
    """Return the files beside an index as Hugging Face makes it, and the keys each must have."""
    with naming(path):
        with open_regular(path) as file:
            data = file.read()
        try:
            weight_map = dict(json.loads(data)["weight_map"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SavedStateError(f"it is no index of safetensors files: {error}") from None
        keys_of: dict[Path, list[str] | None] = {}
        for key, name in weight_map.items():
            # It may be a link: Hugging Face's cache links to files elsewhere.
            if type(name) is not str or ".." in Path(name).parts or Path(name).is_absolute():
                raise SavedStateError(f"{key} is in {name!r}, which is not in the index's folder")
            keys = keys_of.setdefault(path.parent / name, [])
            assert keys is not None, "it was made here"
            keys.append(key)
    return keys_of


def _open_safetensors(keys_of: dict[Path, list[str] | None]) -> Source:
    """Open files; of each the given keys, or all of them for None."""
    open_file: Any = _safetensors().safe_open
    file_of: dict[str, Any] = {}
    shapes: Shapes = {}
    for path, keys in sorted(keys_of.items()):
        with naming(path):
            open_regular(path).close()
            try:
                file = open_file(path, framework="pt")
            except Exception as error:  # of a type of its own
                raise SavedStateError(f"it is no safetensors file: {error}") from None
            there = list(file.keys())
            if missing := set(keys or ()).difference(there):
                raise SavedStateError(f"{min(missing)} is not in it, where the index says it is")
            for key in there if keys is None else keys:
                part = file.get_slice(key)
                file_of[key] = file
                shapes[key] = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
    return Source(shapes, lambda key: file_of[key].get_tensor(key))


def _open_saved_state(path: Path) -> Source:

    index = read_index(path)
    return Source(
        under("model.", index.shapes),
        lambda key: index.read([f"model.{key}"])[f"model.{key}"],
        "procpipe" in index.shapes,
    )


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "safetensors files need the package safetensors: pip install 'procpipe[safetensors]'"
        ) from error
    return safetensors.torch


def _separate(module: nn.Module, keys: FileKeys) -> dict[str, Tensor]:
    """Return a module's tensors, none sharing memory with another, as safetensors demands."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    ours = module.state_dict()
    for own, key in keys.to_write().items():
        value = ours[own]
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{own} of the state dict is a {type(value).__name__}, but safetensors holds "
                "tensors only: use state.save"
            )
        storage = value.untyped_storage()
        is_shared = storage.data_ptr() in seen or storage.nbytes() != value.nbytes
        seen.add(storage.data_ptr())
        found[key] = value.detach().clone() if is_shared else value.detach()
        found[key] = found[key].contiguous()
    return found


def _shape_of(value: Any) -> tuple[tuple[int, ...], torch.dtype | None] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _fits(saved: torch.dtype, ours: torch.dtype, must_be_same: bool) -> bool:
    return saved == ours or (not must_be_same and torch.can_cast(saved, ours))
