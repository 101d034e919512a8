"""Weights from a folder of Hugging Face, and into one; each rank its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procpipe.hf.layers import stack_of
from procpipe.hf.stack import Stack
from procpipe.stage import Stage
from procpipe.state.keys import FileKeys
from procpipe.state.member import Member, raise_faults
from procpipe.state.sharded import is_sharded
from procpipe.state.sources import values_in
from procpipe.state.values import Stored
from procpipe.state.weights import load_values, write_files


def load_pretrained(stage: Stage, folder: Any, *, strict: bool = True) -> None:
    """Load the parameters of a folder of Hugging Face.

    Every rank calls it, and reads only its own stage's tensors, one after the other. They are
    converted to the stage's dtype. The folder's ``generation_config.json``, if it has one, becomes
    the model's ``generation_config``. Modules that ``modules_to_save`` of LoRA trains start from
    these weights; matrices of LoRA are left as they are. Load an adapter afterwards.

    Args:
        stage: of a model by ``hf.sequential``, perhaps built on the meta device.
        folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and its files; of
            the same architecture, also as the base model alone has written it. Not an id of the
            hub, as nothing is downloaded.
        strict: refuse keys that are missing or left over. Without it, what is missing stays as it
            was (a new head for classification, say), but for some of the experts of a layer.

    Raises:
        FileNotFoundError: there is no such file, on some rank.
        ValueError: lists every fault on every rank: missing and unexpected keys, other shapes.
        RemoteStageError: another rank failed.

    Source: ``transformers.PreTrainedModel.from_pretrained``.
    """
    stack = stack_of(stage)
    model = stack.model
    with Member.of(stage).call("hf.load_pretrained") as agree:
        keys = FileKeys.of(stage, None)
        own = {key: name for key, name in keys.own.items() if not is_of_adapter(key)}
        saved = _in_model(stack, values_in(local(folder)))
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        for name in saved.keys() - own.values():
            if any(re.search(each, name) for each in ignored):
                del saved[name]
        faults = load_values(stage, replace(keys, own=own), saved, agree, strict=strict)
        if not faults:
            _start_adapters(stage)
        if not faults and (Path(folder) / "generation_config.json").is_file():
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
        ValueError: the model has adapters of peft.
        NotImplementedError: layers are sharded.
        RemoteStageError: another rank failed.

    Source: ``transformers.PreTrainedModel.save_pretrained``.
    """
    stack, member = stack_of(stage), Member.of(stage)
    path = Path(folder).absolute()
    if any(map(is_of_adapter, stack.names)):
        raise ValueError(
            "hf.save_pretrained writes models without adapters: save these by hf.save_adapter, or "
            "have peft merge them (merge_and_unload()) before hf.sequential"
        )
    if any(map(is_sharded, stage.parameters())):
        raise NotImplementedError(
            "hf.save_pretrained cannot write sharded layers: use state.export, or state.save"
        )
    keys = FileKeys.of(stage, None)
    tied = getattr(stack.model, "all_tied_weights_keys", None) or {}  # to others, by transformers
    with member.call("hf.save_pretrained") as agree:
        from transformers.core_model_loading import revert_weight_conversion

        path.mkdir(parents=True, exist_ok=True)
        values = stage.state_dict()
        twice = {key for key in keys.names if keys.to_file(key) in tied}
        own = {name: values[key] for key, name in keys.own.items() if key not in twice}
        parts = revert_weight_conversion(stack.model, own)  # such as experts
        write_files(path, member.own_share(parts), member, agree)
        dtype = next((value.dtype for value in own.values()), stack.model.config.dtype)
        agree(None, lambda _: _write_configurations(stack.model, path, dtype))


def _write_configurations(model: Any, path: Path, dtype: torch.dtype) -> None:
    config = copy.copy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)


def local(folder: Any) -> Path:
    """Return the path of a folder that is there; an error says what to do with an id of the hub."""
    if not Path(folder).exists():
        raise FileNotFoundError(
            f"there is no folder {folder}, and nothing is downloaded: if it is an id of the hub, "
            f"give the folder that huggingface_hub.snapshot_download({str(folder)!r}) returns"
        )
    return Path(folder)


def is_of_adapter(key: str) -> bool:
    """Return whether a key is of an adapter: a matrix of LoRA, or a module in place of another."""
    return ".lora_" in key or ".modules_to_save." in key


def _start_adapters(stage: Stage) -> None:
    """Set the modules that adapters train to what they replace."""
    modules: Iterable[Any] = stage.modules()
    for module in modules:
        if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
            for of_adapter in module.modules_to_save.values():
                of_adapter.load_state_dict(module.original_module.state_dict())


def _in_model(stack: Stack, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in files as transformers converts it, by the names that its model has.

    Raises:
        ValueError: parts of a tensor (experts) are missing, or have other shapes.
    """
    from transformers import conversion_mapping, core_model_loading

    model = stack.model
    transforms: Any = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    kinds = core_model_loading.WeightRenaming, core_model_loading.WeightConverter
    both: Any = [[each for each in transforms if isinstance(each, kind)] for kind in kinds]
    of_pattern = {pattern: each for each in both[1] for pattern in each.source_patterns}
    place: Any = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": stack.names}
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, str]] = {}  # the patterns of their names, by these
    for name in sorted(saved, key=core_model_loading.dot_natural_key):  # the order of experts
        key, pattern = core_model_loading.rename_source_key(name, *both, **place)
        if pattern is None:
            found[key] = saved[name]
        else:
            parts.setdefault(key, {})[name] = pattern

    def whole(key: str, read: Callable[[Stored], Tensor]) -> Any:
        converter = copy.deepcopy(of_pattern[next(iter(parts[key].values()))])
        for name, pattern in parts[key].items():
            converter.add_tensor(key, name, pattern, read(saved[name]))
        (made,) = converter.convert(key, model=model, config=model.config).values()
        return made[0] if isinstance(made, list) else made

    for key in parts:
        try:
            like = whole(key, lambda part: torch.empty(part.shape, dtype=part.dtype, device="meta"))
        except Exception as error:
            raise ValueError(f"{key} cannot be made of its parts in the files: {error}") from error
        found[key] = Stored(like.shape, like.dtype, partial(whole, key, lambda part: part.get()))
    return found
