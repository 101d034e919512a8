"""Weights from a folder of Hugging Face, and into one; each rank its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procpipe.hf.layers import model_of, set_magnitudes
from procpipe.stage import Stage
from procpipe.state.keys import FileKeys
from procpipe.state.member import Agree, Member, raise_faults
from procpipe.state.sharded import is_sharded
from procpipe.state.sources import INDEX, Source, open_source
from procpipe.state.weights import all_faults, weights_faults, write_files

_GENERATION = "generation_config.json"


def load_pretrained(stage: Stage, folder: Any, *, strict: bool = True) -> None:
    """Load the parameters of a folder of Hugging Face.

    Every rank calls it, and reads only its own stage's tensors, one after the other. They are
    converted to the stage's dtype. The folder's ``generation_config.json``, if it has one, becomes
    the model's ``generation_config``. Modules that ``modules_to_save`` of LoRA trains, and the
    magnitudes of DoRA, start from these weights; matrices of LoRA are left as they are. Load an
    adapter afterwards.

    Args:
        stage: of a model by ``hf.sequential``, perhaps built on the meta device.
        folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and its files; of
            the same architecture, also as the base model alone has written it.
        strict: refuse keys that are missing or left over. Without it, what is missing stays as it
            was (a new head for classification, say).

    Raises:
        FileNotFoundError: there is no such file, on some rank.
        ValueError: lists every fault on every rank: missing and unexpected keys, other shapes. Or
            ``init_lora_weights`` of LoRA computes matrices from weights, as "pissa" does.
        RemoteStageError: another rank failed.

    Source: ``transformers.PreTrainedModel.from_pretrained``.
    """
    model = model_of(stage)
    _check_adapters(model)
    _check_whole(stage, "hf.load_pretrained")
    with Member.of(stage).call("hf.load_pretrained") as agree:
        source = open_source(Path(folder))
        to_file = _without_prefix(stage, source, f"{model.base_model_prefix}.")
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        saved = [key for key in source.shapes if not any(re.search(each, key) for each in ignored)]
        keys = FileKeys.of(stage, to_file)
        pieces = _pieces(stage, model, keys, source)
        faults = read_into(pieces, source, agree, saved, strict=strict, known=keys.facts())
        if not faults:
            _start_adapters(stage)
        if not faults and (Path(folder) / _GENERATION).is_file():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(folder)
    raise_faults(f"the weights in {folder} do not fit", faults)


def save_pretrained(stage: Stage, folder: Any) -> None:
    """Write a folder that ``from_pretrained`` of transformers reads.

    Every rank calls it, writes its own stage's tensors in a file, and returns once all have. LoRA
    is merged into the weights, by peft (``save_adapter`` writes it alone). Rank 0 writes
    ``config.json``, and ``generation_config.json`` if the model has one.

    Args:
        stage: of a model by ``hf.sequential``.
        folder: shared by all ranks; with neither weights nor a configuration in it.

    Raises:
        FileExistsError: there are weights or a configuration in the folder.
        ValueError: LoRA changes a matrix that the model shares under several names.
        RemoteStageError: another rank failed.

    Source: ``transformers.PreTrainedModel.save_pretrained``.
    """
    model, member = model_of(stage), Member.of(stage)
    path = Path(folder).absolute()
    _check_whole(stage, "hf.save_pretrained")
    keys = FileKeys.of(stage, None)
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # which transformers ties to others
    prefixes = tuple(prefix for prefix, _ in _adapted(stage))
    adapted = [name for key, name in keys.own.items() if key.startswith(prefixes)]
    with member.call("hf.save_pretrained") as agree:
        faults = agree(
            [name for name in adapted if name in {*tied, *tied.values()}],
            lambda of_ranks: sorted({*chain.from_iterable(of_ranks)}),
        )
        if not faults:
            values = stage.state_dict() | _merged(stage)
            agree(None, lambda _: make_folder(path, ["config.json", INDEX, "model*.safetensors"]))
            own = {name: values[key] for key, name in _to_write(keys, tied)}
            write_files(path, member.own_share(_parts(model, own)), member, agree)
            dtype = next((value.dtype for value in own.values()), model.config.dtype)
            agree(None, lambda _: _write_configuration(model, path, dtype))
    raise_faults(
        "adapters change one name of a matrix that has several, which one folder cannot hold "
        "(save the adapter alone with hf.save_adapter)",
        faults,
    )


def _write_configuration(model: Any, path: Path, dtype: torch.dtype) -> None:
    config = copy.copy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)


def _check_whole(stage: Stage, call: str) -> None:
    """Check that the folder's tensors are the stage's own."""
    if any(map(is_sharded, stage.parameters())):
        raise NotImplementedError(
            f"{call} with sharded layers is not there yet: load before fully_shard, and save with "
            "state.save or state.export"
        )


def read_into(
    pieces: dict[str, Tensor],
    source: Source,
    agree: Agree,
    saved: Iterable[str],
    *,
    strict: bool,
    known: Sequence[list[str]] = (),
) -> list[str]:
    """Read tensors of files into ``pieces`` by key; return the faults of all ranks, or none.

    If it is ``strict``, each of the keys ``saved`` must be of some stage: in its pieces, or among
    the ``known`` facts of other names of the same memory.
    """
    keys = FileKeys({name: name for name in pieces}, {}, lambda name: name)
    faults: list[str] = agree(
        {
            "keys": [*keys.facts(), *known],
            "faults": weights_faults(pieces, keys, source.shapes, strict=strict),
        },
        lambda facts: all_faults(facts, saved, strict=strict),
    )
    if not faults:
        with torch.no_grad():
            source.read({name: pieces[name] for name in pieces if name in source.shapes})
        agree(None, lambda _: None)  # no rank goes on before all have read
    return faults


def is_of_adapter(key: str) -> bool:
    """Return whether a key is of an adapter: a matrix of LoRA, or a module in place of another."""
    return ".lora_" in key or ".modules_to_save." in key


def make_folder(path: Path, patterns: list[str]) -> None:
    """Make a folder, and check that no file in it has one of these names."""
    path.mkdir(parents=True, exist_ok=True)
    if there := [file.name for pattern in patterns for file in sorted(path.glob(pattern))]:
        raise FileExistsError(f"{path} holds {there[0]} already: save to a new folder")


def _check_adapters(model: Any) -> None:
    """Check that adapters do not start from weights that are not there yet."""
    for config in getattr(model, "peft_config", {}).values():
        if (init := config.init_lora_weights) not in (True, False, "gaussian"):
            raise ValueError(
                f"LoRA with init_lora_weights={init!r} was computed from the weights that the "
                "model had, and may have changed them: give hf.sequential a model by "
                "from_pretrained and get_peft_model, without hf.load_pretrained; or choose True or "
                "'gaussian'"
            )


@torch.no_grad()
def _start_adapters(stage: Stage) -> None:
    """Set what adapters derive from the weights: copies of modules, and the magnitudes of DoRA."""
    modules: Iterable[Any] = stage.modules()
    for module in modules:
        if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
            for of_adapter in module.modules_to_save.values():
                of_adapter.load_state_dict(module.original_module.state_dict())
        set_magnitudes(module)


class _Memory(Tensor):
    """A tensor of which no part is copied; writing to a part writes to it."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        """Return the tensor itself, contiguous or not."""
        return self


def _pieces(stage: Stage, model: Any, keys: FileKeys, source: Source) -> dict[str, Tensor]:
    """Return a stage's memory by keys in files."""
    pieces: dict[str, Tensor] = {}
    to_read = keys.to_read(source.shapes)
    for key, memory in stage.state_dict().items():
        name = to_read.get(key, keys.own[key])
        if not is_of_adapter(key):
            pieces |= {name: memory} if key in to_read else _parts(model, {name: memory})
    return pieces


def _parts(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as transformers saves them: of some, parts (experts), not copied, by key."""
    from transformers.core_model_loading import revert_weight_conversion

    memories: dict[str, Tensor] = {
        key: tensor.detach().as_subclass(_Memory) for key, tensor in tensors.items()
    }
    parts = revert_weight_conversion(model, memories)
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    for key, part in parts.items():
        assert part.untyped_storage().data_ptr() in known, f"{key} is a copy of a part of a tensor"
    return {key: part.as_subclass(Tensor) for key, part in parts.items()}


def _to_write(keys: FileKeys, tied: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys to be written, each with that in the file; of a shared tensor one of all."""
    for key, name in keys.own.items():
        names = keys.names.get(key, (key,))
        written = next((each for each in names if keys.to_file(each) not in tied), names[0])
        if key == written and not is_of_adapter(key):
            yield key, name


def _without_prefix(stage: Stage, source: Source, prefix: str) -> Callable[[str], str]:
    """Return the map from a stage's keys to those in files, perhaps of the base model alone."""
    to_file = FileKeys.of(stage, None).to_file
    if any(key.startswith(prefix) for key in source.shapes):
        return to_file
    return lambda key: to_file(key).removeprefix(prefix)


def _adapted(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Yield each module of peft that changes or replaces weights, with what their keys begin with.

    They are in ``base_layer`` or ``original_module``.
    """
    modules: Iterable[tuple[str, Any]] = stage.named_modules()
    for name, module in modules:
        if getattr(module, "disable_adapters", True):
            continue  # also of modules that are not layers of peft
        if hasattr(module, "original_module"):
            yield f"{name}.original_module.", module
        elif hasattr(module, "get_delta_weight") and not module.merged:
            yield f"{name}.base_layer.", module


@torch.no_grad()
def _merged(stage: Stage) -> dict[str, Tensor]:
    """Return, by key, the weights that adapters change or replace, as they are with them."""
    found: dict[str, Tensor] = {}
    for prefix, module in _adapted(stage):
        if hasattr(module, "original_module"):
            values = module.modules_to_save[module.active_adapters[0]].state_dict()
        else:
            of_peft = copy.deepcopy(module)
            of_peft.merge()
            values = of_peft.get_base_layer().state_dict()
        found |= {f"{prefix}{key}": value for key, value in values.items()}
    return found
