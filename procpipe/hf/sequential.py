"""``sequential(model)``: a model of transformers as an ``nn.Sequential`` over its own modules."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from procpipe.divided import Divided
from procpipe.hf.compared import COMPARED, check_equal, unsupported
from procpipe.hf.layers import Block, Embed, Head
from procpipe.hf.stack import Stack, name_in_files

#: Options of LoRA that files of adapters or copies of weights need, and beginnings without weights.
_REFUSED = ("trainable_token_indices", "target_parameters", "use_dora")
_STARTS = (True, False, "gaussian")

#: The size of the input, without values, of which a balance is estimated.
_NUM_SAMPLES, _LENGTH = 2, 128


def sequential(model: nn.Module) -> nn.Sequential:
    """Make an ``nn.Sequential`` of a model of transformers, one layer a block.

    The layers hold the model's own modules, so the model and the result share parameters; build
    the optimizer from the stage. Change the model (LoRA, gradient checkpointing, dtype) before.
    Does not communicate. A model in eval mode, as ``from_pretrained`` returns it, makes a stage in
    eval mode, with a warning: call ``stage.train()``.

    The first layer takes what the model takes, by name: ``input_ids``, ``attention_mask`` and so
    on, ``(batch, …)`` each. ``labels`` are ignored, as losses are for ``loss_fn``. The last returns
    the logits; of a mixture of experts with ``config.output_router_logits`` the logits and the
    auxiliary loss, 0-dim, multiplied by its coefficient.

    Models whose ``rope_type`` is "dynamic" change their rotary frequencies in a forward pass, which
    recomputation finds: give the stage ``checkpoint="never"``.

    Args:
        model: a decoder or BERT; also with LoRA of peft, without ``trainable_token_indices``,
            ``target_parameters``, ``use_dora``, and initial values computed from weights. It may
            be on the meta device. Of a class that docs/language_models.md does not list, a small
            copy in float64 is compared with transformers first, which takes seconds.

    Returns:
        layers ``embed``, ``block0``, …, ``head``. Its attribute ``keys`` is a function that makes
        the key of the model's state dict from one of its own.

    Raises:
        TypeError: the model is not supported, or its small copy differs; says why.
    """
    plain = _without_adapter(model)
    made = divided(plain)
    is_theirs = type(plain).__module__.startswith("transformers.models.")
    if not (is_theirs and type(plain).__name__ in COMPARED):
        check_equal(plain, divided)
    if not plain.training:
        warnings.warn(
            "the model is in eval mode, as from_pretrained returns it: stage.step() computes no "
            "gradients before stage.train()",
            stacklevel=2,
        )
    return made


def divided(model: Any) -> Divided:
    """Make the ``nn.Sequential`` of a model of transformers itself.

    Raises:
        TypeError: it is another model, or one of which something would be in no layer.
    """
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        raise unsupported(model, "it is not a model of transformers")
    if model.config.is_encoder_decoder:
        raise unsupported(model, "it has an encoder: cut it by procpipe.sequential(model, **batch)")
    name = model.base_model_prefix
    if not hasattr(model, name):
        name = "model"  # of a decoder that is also part of a model of images
    try:
        stack = Stack(model, name)
    except LookupError as error:
        raise unsupported(model, str(error)) from None
    layers: dict[str, nn.Module] = {"embed": Embed(stack, model)}
    layers |= {f"block{k}": Block(stack, model, k) for k in range(stack.num_blocks)}
    layers["head"] = Head(stack, model)
    made = Divided(OrderedDict(layers))
    made.training = model.training
    tokens = torch.empty(_NUM_SAMPLES, _LENGTH, dtype=torch.long, device="meta")
    mask = tokens.new_empty((_NUM_SAMPLES, 1, _LENGTH, _LENGTH), dtype=torch.bool)  # taken as it is
    made.sample = {"input_ids": tokens} | ({"attention_mask": mask} if stack.takes_mask else {})
    made.keys = lambda key: name_in_files(key.partition(".")[2])
    if lost := sorted({made.keys(key) for key in made.state_dict()} ^ stack.names.keys()):
        raise unsupported(model, f"{', '.join(lost)} would be in no layer, or in no model")
    return made


def _without_adapter(model: Any) -> Any:
    """Return the model that peft has put LoRA into."""
    if not type(model).__module__.startswith("peft."):
        return model
    configs = model.peft_config.values()
    if not hasattr(model, "get_base_model") or any(c.peft_type != "LORA" for c in configs):
        raise unsupported(model, "of peft, only LoRA")
    for config in configs:
        refused = [name for name in _REFUSED if getattr(config, name, None)]
        refused += ["init_lora_weights"] * (config.init_lora_weights not in _STARTS)
        if refused:
            raise unsupported(model, f"{' and '.join(refused)} of LoraConfig cannot be used")
    return model.get_base_model()
