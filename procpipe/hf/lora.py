"""The adapter of LoRA alone, in a folder as peft has it."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from procpipe.data.remote import Remote
from procpipe.hf.layers import model_of
from procpipe.hf.weights import faults_of, is_of_adapter, source_in
from procpipe.stage import Stage
from procpipe.state.keys import FileKeys
from procpipe.state.member import Member, raise_faults

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"

#: What peft writes although it is in the file under another key too, or in the base model.
_TWICE = re.compile(r"\.(modules_to_save|original_module)\.|\.base_layer\.weight$")


def save_adapter(stage: Stage, folder: Any, *, name: str = "default") -> None:
    """Write an adapter that ``PeftModel.from_pretrained`` reads.

    Every rank calls it, and waits until rank 0 has written. It has the biases that ``bias`` of
    ``LoraConfig`` trains, too.

    Args:
        stage: of a model with LoRA by ``hf.sequential``.
        folder: of rank 0; as with peft, an adapter that is there is replaced.
        name: of the adapter.

    Raises:
        ValueError: the model has no adapter of this name.
        RemoteStageError: another rank failed.

    Source: ``peft.PeftModel.save_pretrained``.
    """
    config = _config_of(stage, name)
    tensors: dict[str, Tensor] = {}
    ours = {key: value.contiguous() for key, value in _of_adapter(stage, name).items()}
    for rank in stage._grid.same_replica():  # they are small, and peft has one file
        tensors |= stage.fetch(ours if rank == stage.rank else Remote(rank, "an adapter", None))
    with Member.of(stage).call("hf.save_adapter") as agree:

        def write(_: list[Any]) -> None:
            path = Path(folder).absolute()
            path.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path / f"{_WEIGHTS}.new", {"format": "pt"})
            os.replace(path / f"{_WEIGHTS}.new", path / _WEIGHTS)
            config.save_pretrained(path)

        agree(None, write)


def load_adapter(stage: Stage, folder: Any, *, name: str = "default") -> None:
    """Load the matrices of an adapter that peft or ``save_adapter`` has written.

    Every rank calls it, and reads only its own stage's.

    Args:
        stage: of a model by ``hf.sequential`` with LoRA of the same form (give ``get_peft_model``
            the configuration ``LoraConfig.from_pretrained(folder)``).
        folder: with ``adapter_model.safetensors``; or that file.
        name: of the adapter.

    Raises:
        FileNotFoundError: there is no such file, on some rank.
        ValueError: the model has no adapter of this name; or lists every fault on every rank:
            missing and unexpected keys, other shapes.
        RemoteStageError: another rank failed.

    Source: ``peft.PeftModel.load_adapter``.
    """
    _config_of(stage, name)
    with Member.of(stage).call("hf.load_adapter") as agree:
        source = source_in(folder, _WEIGHTS)
        saved = [key for key in source.values if not _TWICE.search(key)]
        pieces = _of_adapter(stage, name)
        faults = faults_of(pieces, source, agree, saved, strict=True)
        if not faults:
            with torch.no_grad():
                source.read(pieces)
            agree(None, lambda _: None)  # no rank goes on before all have read
    raise_faults(f"the adapter in {folder} does not fit", faults)


def _of_adapter(stage: Stage, name: str) -> dict[str, Tensor]:
    """Return this stage's parameters of an adapter, by peft's keys."""
    to_file = FileKeys.of(stage, None).to_file
    part = re.compile(rf"(\.modules_to_save)?\.{re.escape(name)}(?=\.|$)")
    magnitude = re.compile(r"(?<=\.lora_magnitude_vector)\.weight$")
    bias = model_of(stage).peft_config[name].bias
    found = {}
    for key, value in stage.state_dict().items():
        if is_of_adapter(key):
            if part.search(key):
                found[magnitude.sub("", part.sub("", to_file(key)))] = value
        elif key.endswith(".base_layer.bias") and bias != "none":
            found[to_file(key).removesuffix("bias") + "base_layer.bias"] = value
        elif key.endswith("bias") and ".original_module." not in key and bias == "all":
            found[to_file(key)] = value
    return {f"base_model.model.{key}": value for key, value in found.items()}


def _config_of(stage: Stage, name: str) -> Any:
    """Return the configuration of an adapter as it is saved."""
    configs = getattr(model_of(stage), "peft_config", {})
    if name not in configs:
        raise ValueError(
            f"the model has no adapter {name!r}, but {', '.join(configs) or 'none'}: give "
            "hf.sequential what peft.get_peft_model returned"
        )
    config = copy.copy(configs[name])
    config.inference_mode = True
    return config
