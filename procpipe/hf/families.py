"""The classes of models that are supported, and in what some differ from the general rules.

The rules: the model has one stack (its base model), whose forward takes ``inputs_embeds``, runs
modules, a list of blocks, and more modules. Modules before and after the list belong to the first
and the last layer, in the order in which they are registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Family:
    """In what a class of models differs from the general rules."""

    stack: str = ""  # the name of the stack, if it is not the base model's
    #: The name of a stack that runs before it, and whose output each of its blocks takes.
    encoder: str = ""
    adds: tuple[str, ...] = ()  # modules whose result the stack's forward adds to the hidden states
    #: Modules without parameters that the forward calls before and after the blocks.
    twice: tuple[str, ...] = ()
    #: The path in a block of a module that only the first block has, and the forward passes its
    #: result on to the others; with the attribute that says that a block has it.
    shared: tuple[str, str] | None = None


_GENERAL = Family()

#: By the name of the class. Those without a row of their own follow the general rules.
FAMILIES = {
    "GPT2LMHeadModel": Family(adds=("wpe",)),
    **dict.fromkeys(
        (
            *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
            *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM"),
            *("GPTNeoXForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"),
            *("BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"),
        ),
        _GENERAL,
    ),
    "T5ForConditionalGeneration": Family(
        stack="decoder",
        encoder="encoder",
        twice=("dropout",),
        shared=("layer.0.SelfAttention.relative_attention_bias", "has_relative_attention_bias"),
    ),
}


def family_of(model: nn.Module) -> Family:
    """Return the row of a model's class.

    Raises:
        TypeError: not a model of transformers, or of a class that is not supported.
    """
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models."):
        raise unsupported(model, "it is not a model of transformers itself")
    if name not in FAMILIES:
        raise unsupported(model, "its class has not been compared with transformers")
    return FAMILIES[name]


def unsupported(model: Any, reason: str) -> TypeError:
    """Return the error for a model that cannot be made a pipeline."""
    return TypeError(
        f"hf.sequential cannot divide a {type(model).__qualname__}: {reason}; supported are "
        f"{', '.join(sorted(FAMILIES))}, with or without LoRA of peft"
    )
