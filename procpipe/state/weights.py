"""Reads and writes parameters and buffers alone, in formats that other programs share.

No process holds more than its own stage and one tensor, but for ``export`` from a GPU, which holds
the stage's weights once in host memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.state import sharded
from procpipe.state.keys import FileKeys, Keys, collisions, few
from procpipe.state.mapped import Mapped, safetensors
from procpipe.state.member import Agree, Member, raise_faults
from procpipe.state.sources import INDEX, SINGLE, Shapes, Source, open_source

#: How the names of files of ``torch.save`` end.
_ONE_FILE = (".pt", ".pth", ".bin")

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
            :func:`export` and Hugging Face make it, or its index (of several files of
            ``torch.save``, too); or what ``save`` wrote.
        module: the stage; or any module with these keys.
        keys: returns for each key of the full model the key in the file. By default the attribute
            ``keys`` of the ``nn.Sequential`` (that the stage was built from), if it has one;
            ``str`` for the model's own keys. What ``save`` wrote has the model's own keys by
            default.
        strict: refuse keys that are missing or left over. A parameter that the model has under
            several names is not missing if the file has one of them.

    Raises:
        FileNotFoundError: there is no such file, on some rank.
        ModuleNotFoundError: files of safetensors need the package safetensors.
        TypeError: ``keys`` is no function, or returns no str.
        ValueError: lists the faults on every rank, the first of each kind: missing and unexpected
            keys, other shapes, a key in the file for two tensors.
        SavedStateError: a file is damaged, of another kind, or names files outside of its folder.
        RemoteStageError: another rank failed.

    Source: ``torch.nn.Module.load_state_dict``.
    """
    file_keys = FileKeys.of(module, keys)  # before the call, which a mistake would end
    with Member.of(module).call("state.load_weights") as agree:
        source = open_source(Path(path))
        if keys is None and source.is_own:
            file_keys = FileKeys.of(module)

        def judge(facts: list[dict[str, Any]]) -> list[str]:
            named = [value for of_rank in facts for value in of_rank["keys"]]
            return collisions(named) + all_faults(facts, source.shapes, strict=strict)

        faults = weights_faults(
            module.state_dict(),
            file_keys,
            source.shapes,
            strict=strict,
            layers=module.named_children(),
        )
        faults = agree({"keys": file_keys.facts(), "faults": faults}, judge)
        if not faults:
            read_weights(module, file_keys, source)
            agree(None, lambda _: None)  # no rank goes on before all have read
    raise_faults(f"the weights in {path} do not fit", faults)


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
        keys: what each key of the full model is to be called; see :func:`load_weights`, which reads
            the files again with the same ``keys``. Names of one parameter may become one key.

    Raises:
        FileExistsError: the folder is not empty, or the file is there.
        ModuleNotFoundError: files of safetensors need the package safetensors.
        ValueError: different tensors would get one key.
        TypeError: the module's state dict holds more than dense tensors of safetensors' dtypes.
        RemoteStageError: another rank failed.

    Source: the package ``safetensors``; ``huggingface_hub.save_torch_state_dict``.
    """
    one_pipeline = Member.of(module)
    file_keys = FileKeys.of(module, keys)  # before the call, which a mistake would end
    with one_pipeline.call("state.export") as agree:
        member = one_pipeline.among(agree)

        def make_place(facts: list[Any]) -> dict[str, Any]:
            faults, place = collisions(chain.from_iterable(facts)), Path(path).absolute()
            if not faults and member.pipeline == 0:
                folder = place.parent if place.suffix in _ONE_FILE else place
                folder.mkdir(parents=True, exist_ok=True)
                if place.is_file() or (folder == place and any(folder.iterdir())):
                    raise FileExistsError(f"{place} is not empty: export to a new place")
            return {"faults": faults, "place": str(place)}

        agreed = agree(file_keys.facts(), make_place)
        place = Path(agreed["place"])
        if not agreed["faults"]:
            tensors = member.own_share(_tensors(module, file_keys))
            if member.pipeline == 0:
                write = _write_one_file if place.suffix in _ONE_FILE else write_files
                write(place, tensors, one_pipeline, agree)
            member.from_first("written", agree)
    raise_faults(f"nothing was written to {path}", agreed["faults"])


def _write_one_file(path: Path, tensors: dict[str, Tensor], member: Member, agree: Agree) -> None:
    """Write a file a rank, which rank 0 then maps and joins."""
    ours = [path.with_name(f"{path.name}.{rank}.tmp") for rank in range(member.num_ranks)]
    torch.save({key: value.detach().cpu() for key, value in tensors.items()}, ours[member.rank])

    def join(_: list[Any]) -> None:
        mapped = Mapped()
        whole: dict[str, Any] = {}
        for part in ours:
            whole |= mapped.open_torch(part)
        joined = path.with_name(f"{path.name}.tmp")
        torch.save(whole, joined)
        os.rename(joined, path)
        for part in ours:
            part.unlink()

    agree(None, join)


def write_files(folder: Path, tensors: dict[str, Tensor], member: Member, agree: Agree) -> None:
    """Write tensors as Hugging Face does: a file a rank, and rank 0 then writes the index.

    Every rank of a pipeline calls it; returns once all have written.
    """
    last = f"{member.num_ranks:05d}.safetensors"
    name = SINGLE if member.num_ranks == 1 else f"model-{member.rank + 1:05d}-of-{last}"
    write_safetensors(folder / name, tensors)
    num_bytes = sum(value.nbytes for value in tensors.values())

    def write_index(parts: list[Any]) -> None:
        if member.num_ranks > 1:
            weight_map = {key: file for file, keys, _ in parts for key in keys}
            size = sum(own for _, _, own in parts)
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (folder / f"{INDEX}.tmp").write_text(json.dumps(index, indent=2))
            os.rename(folder / f"{INDEX}.tmp", folder / INDEX)

    agree([name, list(tensors), num_bytes], write_index)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device to a file.

    Raises:
        ModuleNotFoundError: the package safetensors is missing.
        TypeError: one is not dense, or has a dtype that the format lacks.
    """
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
    safetensors().torch.save_file(ours, path, metadata={"format": "pt"})


def read_weights(module: nn.Module, keys: FileKeys, source: Source) -> None:
    """Read a module's values, straight into the memory that its state dict shares."""
    ours = module.state_dict()
    with torch.no_grad():
        for key, name in keys.to_read(source.values).items():
            own = ours[key]
            is_direct = isinstance(own, Tensor) and not sharded.is_sharded(own)
            value = source.read({name: own if is_direct else None})[name]
            ours[key] = sharded.like(value, own) if isinstance(value, Tensor) else value
    module.load_state_dict(ours)


# -- what does not fit ---------------------------------------------------------------------------


def weights_faults(
    ours: Mapping[str, Any],
    keys: FileKeys,
    saved: Shapes,
    *,
    strict: bool,
    must_be_same_dtype: bool = False,
    layers: Iterable[tuple[str, nn.Module]] = (),
) -> list[str]:
    """Return what a state dict lacks, and what has another shape, or a dtype that does not fit."""
    classes = {name: type(layer).__qualname__ for name, layer in layers}
    to_read = keys.to_read(saved)
    missing, unfit = [], []
    for key, value in ours.items():
        layer = key.partition(".")[0]
        where = f"layer {layer!r} ({classes[layer]}): " if layer in classes else ""
        name = to_read.get(key, keys.own[key])
        where += key if name == key else f"{key} ({name} in the file)"
        if isinstance(value, Tensor) and value.is_meta:
            unfit.append(f"{where} is on the meta device: give it memory first (to_empty)")
        elif key not in to_read:
            missing.append(f"{where} is missing")
        elif isinstance(value, Tensor) and (
            misfit := _misfit(value, saved[name], must_be_same_dtype=must_be_same_dtype)
        ):
            unfit.append(f"{where} {misfit}")
    return (few(missing) if strict else []) + few(unfit)


def _misfit(
    value: Tensor,
    found: tuple[tuple[int, ...], torch.dtype | None] | None,
    *,
    must_be_same_dtype: bool,
) -> str:
    """Return how a tensor differs from the saved value, if that cannot be loaded; else ""."""
    shape, dtype = found or (None, None)
    if shape != tuple(value.shape):
        form = "is not a tensor" if shape is None else f"has shape {shape}"
        return f"has shape {tuple(value.shape)} but {form} there"
    if dtype in (None, value.dtype):
        return ""
    if must_be_same_dtype or not torch.can_cast(dtype, value.dtype):
        return f"has dtype {value.dtype} but {dtype} there"
    return ""


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
