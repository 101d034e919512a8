"""Small random models of all families, and mini-batches for them.

Everything is float64. A kind of loss is that of the class: over the next tokens (causal), over the
tokens at the same positions (tokens), or over classes (classes).
"""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from procpipe import hf
from procpipe.losses import masked_cross_entropy

_PLAIN = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
_PLAIN |= {"intermediate_size": 20, "max_position_embeddings": 32}
_PLAIN |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2, "head_dim": 4}
_EXPERTS = {"output_router_logits": True, "experts_implementation": "eager"}
_GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_MIXED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
    "query_pre_attn_scalar": 4,
}

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "experts_implementation": "eager"}
_DEEPSEEK = {
    **_GROUPED,
    **_MOE,
    **dict.fromkeys(("num_key_value_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4),
}
_MPT = {"vocab_size": 31, "d_model": 16, "n_layers": 3, "n_heads": 4, "max_seq_len": 32}
_MPT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MAMBA = {**_PLAIN, "num_heads": 8, "head_dim": 4, "state_size": 4, "n_groups": 1}

#: By name: the class, without its suffix; the configuration's values.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", "LMHeadModel", _GPT2),
    "Llama": ("Llama", "ForCausalLM", _GROUPED),
    "Mistral": ("Mistral", "ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "Qwen2": ("Qwen2", "ForCausalLM", _GROUPED),
    "Qwen3": ("Qwen3", "ForCausalLM", _GROUPED),
    "Gemma 2": ("Gemma2", "ForCausalLM", {**_GROUPED, **_MIXED}),
    "Gemma 3": ("Gemma3", "ForCausalLM", {**_GROUPED, **_MIXED, "final_logit_softcapping": 5.0}),
    "Phi-3": ("Phi3", "ForCausalLM", _GROUPED),
    "OLMo 2": ("Olmo2", "ForCausalLM", _GROUPED),
    "GPT-NeoX": ("GPTNeoX", "ForCausalLM", _PLAIN),
    "Mixtral": ("Mixtral", "ForCausalLM", {**_GROUPED, **_EXPERTS, "num_local_experts": 4}),
    "Qwen3-MoE": (
        *("Qwen3Moe", "ForCausalLM"),
        {**_GROUPED, **_EXPERTS, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 8, "mlp_only_layers": [0]},
    ),
    "BERT": ("Bert", "ForSequenceClassification", {**_PLAIN, "num_labels": 3}),
    "BERT, tokens": ("Bert", "ForTokenClassification", {**_PLAIN, "num_labels": 3}),
    "Falcon": ("Falcon", "ForCausalLM", _PLAIN),
    "MPT": ("Mpt", "ForCausalLM", _MPT),
    "Cohere": ("Cohere", "ForCausalLM", _GROUPED),
    "Cohere 2": ("Cohere2", "ForCausalLM", {**_GROUPED, **_MIXED}),
    "Granite": ("Granite", "ForCausalLM", {**_GROUPED, "embedding_multiplier": 3.0}),
    "StarCoder2": ("Starcoder2", "ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "SmolLM3": ("SmolLM3", "ForCausalLM", {**_GROUPED, "no_rope_layers": [1, 1, 0]}),
    "DeepSeek V2": ("DeepseekV2", "ForCausalLM", _DEEPSEEK),
    "DeepSeek V3": ("DeepseekV3", "ForCausalLM", _DEEPSEEK),
    "gpt-oss": ("GptOss", "ForCausalLM", {**_GROUPED, **_MOE, **_MIXED, "num_local_experts": 4}),
    "Gemma": ("Gemma", "ForCausalLM", _GROUPED),
    "Phi": ("Phi", "ForCausalLM", _PLAIN),
    "Mamba 2": ("Mamba2", "ForCausalLM", _MAMBA),
    "OLMo 3": ("Olmo3", "ForCausalLM", {**_GROUPED, **_MIXED}),
    "BERT, tied": ("Bert", "ForMaskedLM", _PLAIN),
}

_DROPOUTS = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"),
    *("embd_dropout", "residual_dropout", "embedding_dropout"),
)


def config_of(name: str, dropout: float = 0.0, **others: Any) -> Any:
    """Return the configuration of a case, with some other values."""
    family, _, values = CASES[name]
    form = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, form)(**values | others)
    for key in _DROPOUTS:
        if hasattr(config, key):
            setattr(config, key, dropout)
    return config


def class_of(name: str) -> Any:
    """Return the class of a case's model."""
    family, suffix, _ = CASES[name]
    return getattr(transformers, family + suffix)


def model_of(name: str, dropout: float = 0.0, seed: int = 0, **others: Any) -> Any:
    """Return the model of a case, in training mode; the same for the same arguments."""
    torch.manual_seed(seed)
    model = class_of(name)(config_of(name, dropout, **others)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    return model


#: How texts are put into a mini-batch: with padding on the right, on the left or on both sides.
RIGHT, LEFT, BOTH = "right", "left", "both"

#: Several texts in each row, without padding.
PACKED = "packed"

#: Those for which a model can be compared with transformers, which gives NaN in other ones: what no
#: token attends to is NaN in eager attention.
_EAGER = ("Gemma2", "Mpt")


def batches_of(name: str) -> tuple[str, ...]:
    """Return the forms of mini-batches that a case has."""
    family = CASES[name][0]
    packed = () if family in ("Bert", "Mpt", "Mamba2") else (PACKED,)
    return (RIGHT, *(() if family in _EAGER else (LEFT,)), *packed)


def batch_of(
    name: str, size: int = 5, form: str = BOTH
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a mini-batch, by default with padding on both sides, and labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 31, (size, 9), generator=generator)
    mask = torch.ones_like(tokens)
    if form in (RIGHT, BOTH):
        mask[1, -3:] = mask[-1, -1:] = 0
    if form == LEFT or (form == BOTH and LEFT in batches_of(name)):
        mask[2, :4] = 0
    batch = {"input_ids": tokens * mask, "attention_mask": mask}
    if form == PACKED:
        positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).expand_as(tokens).clone()
        batch = {"input_ids": tokens, "position_ids": positions}
    if name == "BERT":
        return batch, torch.arange(size) % 3
    labels = (tokens % 3 if name == "BERT, tokens" else tokens).masked_fill(mask == 0, -100)
    return batch, labels


def loss_of(name: str) -> Any:
    """Return the loss of a case; of a plain model's output, too."""
    return masked_cross_entropy if name.startswith("BERT") else hf.causal_lm_loss


def output_of(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Return what the last layer of a pipeline would, by transformers' own forward."""
    output = model(**batch, use_cache=False)
    if (auxiliary := output.get("aux_loss")) is None:
        return output.logits
    return output.logits, model.router_aux_loss_coef * auxiliary
