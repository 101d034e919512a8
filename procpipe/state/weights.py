"""Reads and writes parameters and buffers alone, in formats that other programs share.

No process holds more than its own stage and a few MiB: tensors are read and written in pieces. Of
what ``save`` wrote, and where elements have another order in memory, it holds one tensor more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.state import sharded
from procpipe.state.keys import FileKeys, Keys, advice, collisions, few
from procpipe.state.member import Member, raise_faults
from procpipe.state.pieces import write_safetensors
from procpipe.state.sources import INDEX, SINGLE, Shapes, open_source


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
            :func:`export` and Hugging Face make it, or its index (of several files of
            ``torch.save``, too); or what ``save`` wrote.
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
        RemoteStageError: another rank failed.

    Source: ``torch.nn.Module.load_state_dict``.
    """
    file_keys = FileKeys.of(module, keys)  # before the call, which a mistake would end
    with Member.of(module).call("state.load_weights") as agree:
        source = open_source(Path(path))
        if keys is None and source.is_own:
            file_keys = FileKeys.of(module, ())

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
                    own = ours[key]  # read into the model's memory, unless that is a shard
                    is_whole = isinstance(own, Tensor) and not sharded.is_sharded(own)
                    ours[key] = sharded.like(source.read(name, own if is_whole else None), own)
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
        TypeError: the module's state dict holds more than dense tensors of safetensors' dtypes.
        RemoteStageError: another rank failed.

    Source: the package ``safetensors``; ``huggingface_hub.save_torch_state_dict``.
    """
    member = Member.of(module)
    rank, num_ranks = member.rank, member.num_ranks  # of this pipeline
    file_keys = FileKeys.of(module, keys)  # before the call, which a mistake would end
    with member.call("state.export") as agree:
        member = member.among(agree)

        def make_folder(facts: list[Any]) -> dict[str, Any]:
            faults = collisions(chain.from_iterable(facts))
            folder = Path(path).absolute()
            if not faults and member.pipeline == 0:
                folder.mkdir(parents=True, exist_ok=True)
                if any(folder.iterdir()):
                    raise FileExistsError(f"{folder} is not empty: export to a new folder")
            return {"faults": faults, "folder": str(folder)}

        def write_index(parts: list[Any]) -> None:
            if num_ranks > 1:
                weight_map = {key: file for file, names, _ in parts for key in names}
                size = sum(num_bytes for _, _, num_bytes in parts)
                text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
                (folder / f"{INDEX}.tmp").write_text(text)
                os.rename(folder / f"{INDEX}.tmp", folder / INDEX)

        agreed = agree(file_keys.facts(), make_folder)
        folder = Path(agreed["folder"])
        if not agreed["faults"]:
            tensors = member.own_share(_tensors(module, file_keys))
            one_of_several = f"model-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"
            name = SINGLE if num_ranks == 1 else one_of_several
            if member.pipeline == 0:
                num_bytes = write_safetensors(folder / name, tensors)
                agree([name, list(tensors), num_bytes], write_index)
            member.from_first("written", agree)
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


def _tensors(module: nn.Module, keys: FileKeys) -> dict[str, Tensor]:
    """Return what a module is to write, by key in the file."""
    ours = module.state_dict()
    for key, value in ours.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{key} of the state dict is a {type(value).__name__}, but safetensors holds "
                "tensors only: use state.save"
            )
    return {name: ours[key] for key, name in keys.to_write().items()}


def _fits(saved: torch.dtype, ours: torch.dtype, must_be_same: bool) -> bool:
    return saved == ours or (not must_be_same and torch.can_cast(saved, ours))
