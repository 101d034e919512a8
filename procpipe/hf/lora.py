"""The adapter of LoRA alone, in a folder as peft has it."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from procpipe.data.remote import Remote
from procpipe.hf.layers import stack_of
from procpipe.hf.weights import local
from procpipe.stage import Stage
from procpipe.state.keys import FileKeys
from procpipe.state.member import Member, raise_faults
from procpipe.state.sources import values_in
from procpipe.state.weights import load_values

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"

#: What peft writes although it is in the file under another key too, or in the base model.
_TWICE = re.compile(r"\.(modules_to_save|original_module)\.|\.base_layer\.weight$")


def save_adapter(stage: Stage, folder: Any) -> None:
    """Write an adapter that ``PeftModel.from_pretrained`` reads.

    Every rank calls it, and waits until rank 0 has written. It has the biases that ``bias`` of
    ``LoraConfig`` trains, too.

    Args:
        stage: of a model with LoRA by ``hf.sequential``.
        folder: of rank 0; as with peft, an adapter that is there is replaced.

    Raises:
        ValueError: the model has no adapter, or several.
        RemoteStageError: another rank failed.

    Source: ``peft.PeftModel.save_pretrained``.
    """
    config = _config_of(stage)
    tensors: dict[str, Tensor] = {}
    state = stage.state_dict()
    ours = {key: state[own].contiguous() for own, key in _of_adapter(stage).items()}
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


def load_adapter(stage: Stage, folder: Any) -> None:
    """Load the matrices of an adapter that peft or ``save_adapter`` has written.

    Every rank calls it, and reads only its own stage's.

    Args:
        stage: of a model by ``hf.sequential`` with LoRA of the same form (give ``get_peft_model``
            the configuration ``LoraConfig.from_pretrained(folder)``).
        folder: with ``adapter_model.safetensors``.

    Raises:
        FileNotFoundError: there is no such file, on some rank.
        ValueError: the model has no adapter, or several; or lists every fault on every rank:
            missing and unexpected keys, other shapes.
        RemoteStageError: another rank failed.

    Source: ``peft.PeftModel.load_adapter``.
    """
    _config_of(stage)
    with Member.of(stage).call("hf.load_adapter") as agree:
        values = values_in(local(folder) / _WEIGHTS)
        keys = FileKeys(_of_adapter(stage), {}, str)
        saved = {key: value for key, value in values.items() if not _TWICE.search(key)}
        faults = load_values(stage, keys, saved, agree, strict=True)
    raise_faults(f"the adapter in {folder} does not fit", faults)


def _of_adapter(stage: Stage) -> dict[str, str]:
    """Return what this stage has of the adapter: peft's keys, by the stage's own."""
    from peft import get_peft_model_state_dict

    view: Any = nn.ModuleDict(dict(stage.named_children()))
    view.peft_config = stack_of(stage).model.peft_config
    (name,) = view.peft_config
    names = {key: key for key in stage.state_dict()}  # in place of tensors, which stay as they are
    found = get_peft_model_state_dict(view, names, name, save_embedding_layers=False)
    of_peft = {own: f"base_model.model.{key.partition('.')[2]}" for key, own in found.items()}
    return {own: key for own, key in of_peft.items() if not _TWICE.search(key)}


def _config_of(stage: Stage) -> Any:
    """Return the configuration of the adapter as it is saved."""
    configs = getattr(stack_of(stage).model, "peft_config", {})
    if len(configs) != 1:
        raise ValueError(
            f"the model has {len(configs)} adapters, not one: give hf.sequential what "
            "peft.get_peft_model returned"
        )
    config = copy.copy(*configs.values())
    config.inference_mode = True
    return config
