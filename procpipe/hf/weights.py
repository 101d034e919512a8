"""Weights from a folder of Hugging Face, and into one; each rank its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procpipe.hf.layers import model_of, set_magnitudes
from procpipe.stage import Stage
from procpipe.state.keys import FileKeys, few
from procpipe.state.member import Member, raise_faults
from procpipe.state.sharded import is_sharded
from procpipe.state.sources import values_in
from procpipe.state.values import Stored
from procpipe.state.weights import load_values, write_files

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
            the same architecture, also as the base model alone has written it. Not an id of the
            hub, as nothing is downloaded.
        strict: refuse keys that are missing or left over. Without it, what is missing stays as it
            was (a new head for classification, say), but for some of the experts of a layer.

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
        source = source_in(folder)
        keys = FileKeys.of(stage, _without_prefix(stage, source, f"{model.base_model_prefix}."))
        own = {key: name for key, name in keys.own.items() if not is_of_adapter(key)}
        saved = _in_model(model, source)
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        for name in saved.keys() - own.values():
            if any(re.search(each, name) for each in ignored):
                del saved[name]
        faults = load_values(stage, replace(keys, own=own), saved, agree, strict=strict)
        if not faults:
            _start_adapters(stage)
        if not faults and (Path(folder) / _GENERATION).is_file():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(folder)
    raise_faults(f"the weights in {folder} do not fit", faults)


def save_pretrained(stage: Stage, folder: Any) -> None:
    """Write a folder that ``from_pretrained`` of transformers reads.

    Every rank calls it, writes its own stage's tensors in a file, and returns once all have. Rank 0
    writes ``config.json``, and ``generation_config.json`` if the model has one. As transformers
    does, it replaces the files of an earlier model in the folder, once all new ones are written.
    Tensors that transformers saves in parts, such as experts, are in host memory twice meanwhile.

    Args:
        stage: of a model by ``hf.sequential``.
        folder: shared by all ranks.

    Raises:
        ValueError: an adapter of peft is active on some rank.
        RemoteStageError: another rank failed.

    Source: ``transformers.PreTrainedModel.save_pretrained``.
    """
    model, member = model_of(stage), Member.of(stage)
    path = Path(folder).absolute()
    _check_whole(stage, "hf.save_pretrained")
    keys = FileKeys.of(stage, None)
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # which transformers ties to others
    with member.call("hf.save_pretrained") as agree:
        faults = agree([*_active(stage)], lambda of_ranks: few(sorted({*chain(*of_ranks)})))
        if not faults:
            agree(None, lambda _: path.mkdir(parents=True, exist_ok=True))
            values = stage.state_dict()
            own = {name: values[key] for key, name in _to_write(keys, tied)}
            write_files(path, member.own_share(_parts(model, own)), member, agree)
            dtype = next((value.dtype for value in own.values()), model.config.dtype)
            agree(None, lambda _: _write_configurations(model, path, dtype))
    raise_faults(
        "hf.save_pretrained writes whole models, but adapters are active: save them alone with "
        "hf.save_adapter, or merge them by peft (merge_and_unload() before hf.sequential, or "
        "merge() of their modules)",
        faults,
    )


def _write_configurations(model: Any, path: Path, dtype: torch.dtype) -> None:
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


def source_in(folder: Any, name: str = "") -> dict[str, Any]:
    """Return what the files in a folder hold; a name is of the one file that counts.

    Raises:
        FileNotFoundError: there is no such folder or file; says what to do with an id of the hub.
    """
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no folder {folder}, and nothing is downloaded: if it is an id of the hub, "
            f"give the folder that huggingface_hub.snapshot_download({str(folder)!r}) returns"
        )
    return values_in(path / name if name and path.is_dir() else path)


def is_of_adapter(key: str) -> bool:
    """Return whether a key is of an adapter: a matrix of LoRA, or a module in place of another."""
    return ".lora_" in key or ".modules_to_save." in key


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


def _converted(key: str, convert: Callable[[Callable[[Stored], Tensor]], Tensor]) -> Stored:
    """Return a tensor that transformers makes of several in files, as of experts.

    ``convert`` returns it, given a function that reads one of them.

    Raises:
        ValueError: some of them are missing, or have other shapes.
    """
    try:
        whole = convert(lambda part: torch.empty(part.shape, dtype=part.dtype, device="meta"))
    except Exception as error:
        raise ValueError(f"{key} cannot be made of its parts in the files: {error}") from error
    return Stored(whole.shape, whole.dtype, lambda: convert(lambda part: part.get()))


def _in_model(model: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in files as transformers converts it, by the names that its model has."""
    from transformers import conversion_mapping, core_model_loading

    transforms: Any = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    kinds = core_model_loading.WeightRenaming, core_model_loading.WeightConverter
    both: Any = [[each for each in transforms if isinstance(each, kind)] for kind in kinds]
    of_pattern = {pattern: each for each in both[1] for pattern in each.source_patterns}
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, str]] = {}  # the patterns of their names, by these
    for name in sorted(saved, key=core_model_loading.dot_natural_key):  # the order of experts
        key, pattern = core_model_loading.rename_source_key(name, *both)
        if pattern is None:
            found[key] = saved[name]
        else:
            parts.setdefault(key, {})[name] = pattern

    def convert(key: str, read: Callable[[Stored], Tensor]) -> Tensor:
        converter = copy.deepcopy(of_pattern[next(iter(parts[key].values()))])
        for name, pattern in parts[key].items():
            converter.add_tensor(key, name, pattern, read(saved[name]))
        (made,) = converter.convert(key, model=model, config=model.config).values()
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole

    return found | {key: _converted(key, partial(convert, key)) for key in parts}


def _parts(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as transformers saves them: of some, parts (experts), by key in files."""
    from transformers.core_model_loading import revert_weight_conversion

    parts: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return parts


def _to_write(keys: FileKeys, tied: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys to be written, each with that in the file; of a shared tensor one of all."""
    for key, name in keys.own.items():
        names = keys.names.get(key, (key,))
        written = next((each for each in names if keys.to_file(each) not in tied), names[0])
        if key == written and not is_of_adapter(key):
            yield key, name


def _without_prefix(stage: Stage, source: Mapping[str, Any], prefix: str) -> Callable[[str], str]:
    """Return the map from a stage's keys to those in files, perhaps of the base model alone."""
    to_file = FileKeys.of(stage, None).to_file
    if any(key.startswith(prefix) for key in source):
        return to_file
    return lambda key: to_file(key).removeprefix(prefix)


def _active(stage: Stage) -> Iterator[str]:
    """Yield the names of modules of peft that change or replace weights."""
    modules: Iterable[tuple[str, Any]] = stage.named_modules()
    for name, module in modules:
        if getattr(module, "disable_adapters", True):
            continue  # also of modules that are not layers of peft
        is_changed = hasattr(module, "get_delta_weight") and not module.merged
        if is_changed or hasattr(module, "original_module"):
            yield name.partition(".")[2]
