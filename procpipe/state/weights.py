"""Reads and writes parameters and buffers alone, in formats that other programs share.

No process holds more than its own stage and one tensor, but for ``export`` from a GPU, which holds
the stage's weights once in host memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from procpipe.run.coordinator import Agree
from procpipe.state import sharded
from procpipe.state.keys import FileKeys, Keys, collisions, few
from procpipe.state.member import Member, of_all_ranks, raise_faults
from procpipe.state.sources import INDEX, SINGLE, values_in
from procpipe.state.values import Stored, replaced

#: How the names of files of ``torch.save`` end.
_ONE_FILE = (".pt", ".pth", ".bin")

#: The names of the files of a model, whole or not.
_OF_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.tmp)?")

#: Dtypes of torch for which the format has no name.
_NOT_IN_SAFETENSORS = (torch.complex128, torch.complex32)


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
            ``export`` and Hugging Face make it; or its index, also of files of ``torch.save``.
        module: the stage; or any module with these keys.
        keys: returns for each key of the full model the key in the file. By default the attribute
            ``keys`` of the ``nn.Sequential`` (that the stage was built from), if it has one;
            ``str`` for the model's own keys.
        strict: refuse keys that are missing or left over. A parameter that the model has under
            several names is not missing if the file has one of them.

    Raises:
        FileNotFoundError: there is no such file, on some rank.
        TypeError: ``keys`` is no function, or returns no str.
        ValueError: lists the faults on every rank, the first of each kind: missing and unexpected
            keys, other shapes, a key in the file for two tensors.
        SavedStateError: a file is damaged, or of another kind.
        RemoteStageError: another rank failed.

    Source: ``torch.nn.Module.load_state_dict``.
    """
    file_keys = FileKeys.of(module, keys)  # before the call, which a mistake would end
    with Member.of(module).call("state.load_weights") as agree:
        faults = load_values(module, file_keys, values_in(Path(path)), agree, strict=strict)
    raise_faults(f"the weights in {path} do not fit", faults)


def load_values(
    module: nn.Module, keys: FileKeys, saved: Mapping[str, Any], agree: Agree, *, strict: bool
) -> list[str]:
    """Load what ``keys`` name of a module on all ranks, or return the faults of all of them."""

    def judge(facts: list[dict[str, Any]]) -> list[str]:
        named = [value for of_rank in facts for value in of_rank["keys"]]
        return collisions(named) + all_faults(facts, saved, strict=strict)

    own = weights_faults(module, keys, saved, strict=strict)
    faults: list[str] = agree({"keys": keys.facts(), "faults": own}, judge)
    if not faults:
        read_weights(module, keys, saved)
        agree(None, len)  # no rank goes on before all have read
    return faults


def export(path: str | os.PathLike[str], module: nn.Module, *, keys: Keys | None = None) -> None:
    """Write parameters and buffers, in the full model's keys or in others.

    Every rank calls it, and returns once all have written. A folder of safetensors is laid out as
    Hugging Face does it: several stages make ``model-00001-of-00003.safetensors``, …, and
    ``model.safetensors.index.json``; one makes ``model.safetensors``. A file gets the state dict of
    the whole model, as ``torch.save`` of plain PyTorch writes it.

    Args:
        path: a folder that is empty, or not there yet; or a file that is not there yet, whose name
            ends in ``.pt``, ``.pth`` or ``.bin``. Shared by all ranks.
        module: the stage; or any module.
        keys: what each key of the full model is to be called; see ``load_weights``, which reads
            the files again with the same ``keys``. Names of one parameter may become one key.

    Raises:
        FileExistsError: the folder is not empty, or the file is there.
        ValueError: different tensors would get one key.
        TypeError: the module's state dict holds more than dense tensors of safetensors' dtypes.
        RemoteStageError: another rank failed.

    Source: the package ``safetensors``; ``huggingface_hub.save_torch_state_dict``.
    """
    in_pipeline = Member.of(module)
    file_keys = FileKeys.of(module, keys)  # before the call, which a mistake would end
    with in_pipeline.call("state.export") as agree_in_pipeline:
        member, agree = in_pipeline.among(agree_in_pipeline)

        faults = agree(file_keys.facts(), lambda facts: collisions(chain.from_iterable(facts)))
        if not faults:
            place = Path(agree(str(Path(path).absolute()), itemgetter(0)))
            is_one = place.suffix in _ONE_FILE
            folder = place.with_name(f"{place.name}.tmp") if is_one else place
            agree(lambda: _make(place, folder) if member.rank == 0 else None, len)
            values = module.state_dict()
            named = {name: values[key] for key, name in file_keys.to_write().items()}
            for key, value in named.items():
                if not isinstance(value, Tensor):
                    kind = type(value).__name__
                    raise TypeError(f"{key} of the state dict is a {kind}: use state.save")
            tensors = member.own_share(named)
            if member.pipeline == 0:
                write_files(folder, tensors, in_pipeline, agree_in_pipeline)
            if is_one and member.rank == 0:
                _join(folder, place)
            agree(None, len)
    raise_faults(f"nothing was written to {path}", faults)


def _make(place: Path, folder: Path) -> None:
    """Make the folder for an export, on rank 0."""
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        raise FileExistsError(f"{place} is not empty: export to a new place")
    folder.mkdir(parents=True, exist_ok=True)


def _join(folder: Path, place: Path) -> None:
    """Make one file of those in a folder, which it removes."""
    whole = folder / "whole"
    torch.save({key: value.get() for key, value in values_in(folder).items()}, whole)
    os.rename(whole, place)
    shutil.rmtree(folder)


def write_files(folder: Path, tensors: dict[str, Tensor], member: Member, agree: Agree) -> None:
    """Write tensors as Hugging Face does: a file a rank, and rank 0 then writes the index.

    Every rank of a pipeline calls it; returns once all have written. Files of an earlier model in
    the folder are replaced then.

    Raises:
        TypeError: a tensor is not dense, or has a dtype that the format lacks.
    """
    last = f"{member.num_ranks:05d}.safetensors"
    name = SINGLE if member.num_ranks == 1 else f"model-{member.rank + 1:05d}-of-{last}"
    seen: set[int] = set()
    ours: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if value.layout != torch.strided or value.dtype in _NOT_IN_SAFETENSORS:
            raise TypeError(
                f"{key} is a {value.layout} tensor of {value.dtype}, which safetensors cannot hold"
            )
        own = value.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        ours[key] = own.clone() if storage in seen else own  # the package refuses shared memory
        seen.add(storage)
    safetensors.torch.save_file(ours, folder / f"{name}.tmp", metadata={"format": "pt"})
    num_bytes = sum(value.nbytes for value in tensors.values())

    def replace_files(parts: list[Any]) -> None:
        (folder / INDEX).unlink(missing_ok=True)  # it must never name files of two models
        names = [file for file, _, _ in parts]
        for file in names:
            os.replace(folder / f"{file}.tmp", folder / file)
        for old in folder.iterdir():
            if old.name not in names and _OF_MODEL.fullmatch(old.name):
                old.unlink()
        if member.num_ranks > 1:
            weight_map = {key: file for file, keys, _ in parts for key in keys}
            size = sum(own for _, _, own in parts)
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (folder / f"{INDEX}.tmp").write_text(json.dumps(index, indent=2))
            os.rename(folder / f"{INDEX}.tmp", folder / INDEX)

    agree([name, list(tensors), num_bytes], replace_files)


def read_weights(module: nn.Module, keys: FileKeys, saved: Mapping[str, Any]) -> None:
    """Read a module's values, straight into the memory that its state dict shares."""
    ours = module.state_dict()
    with torch.no_grad():
        for key, name in keys.to_read(saved).items():
            own, value = ours[key], saved[name]
            if not isinstance(own, Tensor) or not isinstance(value, Stored):
                ours[key] = replaced(value, Stored, Stored.copy)
            elif sharded.is_sharded(own):
                ours[key] = sharded.like(value.get(), own)
            else:
                own.copy_(value.get())
    module.load_state_dict(ours)


# -- what does not fit ---------------------------------------------------------------------------


def weights_faults(
    module: nn.Module,
    keys: FileKeys,
    saved: Mapping[str, Any],
    *,
    strict: bool,
    must_be_same_dtype: bool = False,
) -> list[str]:
    """Return what is missing, of what ``keys`` name, and what has another shape or dtype."""
    classes = {name: type(layer).__qualname__ for name, layer in module.named_children()}
    to_read, state = keys.to_read(saved), module.state_dict()
    missing, unfit = [], []
    for key, in_file in keys.own.items():
        value, name = state[key], to_read.get(key, in_file)
        layer = key.partition(".")[0]
        where = f"layer {layer!r} ({classes[layer]}): " if layer in classes else ""
        where += key if name == key else f"{key} ({name} in the file)"
        if isinstance(value, Tensor) and value.is_meta:
            unfit.append(f"{where} is on the meta device: give it memory first (to_empty)")
        elif key not in to_read:
            missing.append(f"{where} is missing")
        elif isinstance(value, Tensor):
            misfit = _misfit(value, saved[name], must_be_same_dtype=must_be_same_dtype)
            unfit += [f"{where} {misfit}"] if misfit else []
    return (few(missing) if strict else []) + few(unfit)


def _misfit(value: Tensor, saved: Any, *, must_be_same_dtype: bool) -> str:
    """Return how a tensor differs from the saved value, if that cannot be loaded; else ""."""
    if not isinstance(saved, Stored):
        return f"has shape {tuple(value.shape)} but is not a tensor there"
    if saved.shape != tuple(value.shape):
        return f"has shape {tuple(value.shape)} but has shape {saved.shape} there"
    is_fit = not must_be_same_dtype and torch.can_cast(saved.dtype, value.dtype)
    if saved.dtype != value.dtype and not is_fit:
        return f"has dtype {value.dtype} but {saved.dtype} there"
    return ""


def all_faults(facts: list[dict[str, Any]], saved: Iterable[str], *, strict: bool) -> list[str]:
    """Return the faults of all ranks, from the ``keys`` and ``faults`` of each; unused keys too."""
    known = {name for of_rank in facts for _, name, _ in of_rank["keys"]}
    unexpected = [key for key in saved if key not in known] if strict else []
    return of_all_ranks(facts) + few(
        f"{key} is there, but no layer of the model has it" for key in unexpected
    )
