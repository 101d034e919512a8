"""The classes of models that were compared with transformers, and what few of them need.

The rules for all: the model has one stack (its base model), whose forward takes ``inputs_embeds``,
runs modules, all blocks of one list in order, and more modules. ``stack.py`` finds out which.
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
    #: The path in a block of a module that only the first block has, and the forward passes its
    #: result on to the others; with the attribute that says that a block has it.
    shared: tuple[str, str] | None = None


#: By the name of the class.
_FAMILIES = {
    "T5ForConditionalGeneration": Family(
        stack="decoder",
        encoder="encoder",
        shared=("layer.0.SelfAttention.relative_attention_bias", "has_relative_attention_bias"),
    ),
}

#: The classes of the table in docs/language_models.md, which ``python -m tests.hf`` compares.
COMPARED = frozenset(
    (
        *("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
        *("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"),
        *("Olmo2ForCausalLM", "GPTNeoXForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"),
        *("FalconForCausalLM", "MptForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM"),
        *("GraniteForCausalLM", "Starcoder2ForCausalLM", "SmolLM3ForCausalLM"),
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"),
        *("GemmaForCausalLM", "PhiForCausalLM", "Mamba2ForCausalLM", "Olmo3ForCausalLM"),
        *("BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"),
        "T5ForConditionalGeneration",
    )
)


def family_of(model: nn.Module) -> Family:
    """Return in what a model's class differs from the general rules."""
    return _FAMILIES.get(type(model).__name__, Family())


def is_compared(model: nn.Module) -> bool:
    """Return whether the class of a model was compared with transformers as a whole."""
    is_theirs = type(model).__module__.startswith("transformers.models.")
    return is_theirs and type(model).__name__ in COMPARED


def unsupported(model: Any, reason: str) -> TypeError:
    """Return the error for a model that cannot be made a pipeline."""
    return TypeError(
        f"hf.sequential cannot divide a {type(model).__qualname__}: {reason}; models that work are "
        "in the table of docs/language_models.md, with or without LoRA of peft"
    )
