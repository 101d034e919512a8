"""Models of transformers, small and random, and the same cut into two halves by hand.

    First    embedding, first blocks               tokens, mask ──> hidden states
    Second   other blocks, norm, output layer      hidden states, mask ──> logits

Each half makes its mask and its rotary table once a micro-batch, as the whole model does. So it is
what one would write without ``procpipe.hf``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: By name: the names of the embedding, the blocks and the norm in the base model.
MODELS = {"gpt2": ("wte", "h", "ln_f"), "llama": ("embed_tokens", "layers", "norm")}

NUM_BLOCKS, WIDTH, NUM_HEADS, NUM_WORDS = 8, 256, 4, 1024


def model_of(name: str, num_tokens: int, *, width: int = WIDTH) -> Any:
    """Build a model, with the same parameters every time, without dropout.

    Args:
        name: ``"gpt2"``, whose embedding and output layer share a matrix, or ``"llama"``, where
            they do not.
        num_tokens: the longest sequence.
        width: of the hidden states.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=NUM_WORDS,
                n_positions=num_tokens,
                bos_token_id=None,
                eos_token_id=None,
                n_embd=width,
                n_layer=NUM_BLOCKS,
                n_head=NUM_HEADS,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=NUM_WORDS,
            max_position_embeddings=num_tokens,
            hidden_size=width,
            intermediate_size=4 * width * 2 // 3,
            num_hidden_layers=NUM_BLOCKS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS // 2,
        )
    )


class Half(nn.Module):
    """Half of a model's blocks, the first with the embedding, the second with the output layer."""

    def __init__(self, name: str, model: Any, *, is_last: bool) -> None:
        super().__init__()
        base, (embedding, blocks, norm) = model.base_model, MODELS[name]
        self.config, self.is_last = model.config, is_last
        all_blocks = list(base.get_submodule(blocks))
        middle = len(all_blocks) // 2
        self.blocks = nn.ModuleList(all_blocks[middle:] if is_last else all_blocks[:middle])
        self.embedding = None if is_last else base.get_submodule(embedding)
        self.positions = None if is_last else getattr(base, "wpe", None)
        self.rotary = getattr(base, "rotary_emb", None)
        self.norm = base.get_submodule(norm) if is_last else None
        self.output = model.lm_head if is_last else None

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """Run it on tokens ``(batch, length)`` or hidden states ``(batch, length, width)``."""
        from transformers.masking_utils import create_causal_mask

        position_ids = torch.arange(x.shape[1]).unsqueeze(0)
        if self.embedding is not None:
            x = self.embedding(x)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        named = {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=x,
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=position_ids,
            ),
            "position_ids": position_ids,
        }
        if self.rotary is not None:
            named["position_embeddings"] = self.rotary(x, position_ids=position_ids)
        for block in self.blocks:
            x = block(x, use_cache=False, **named)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x


class Carrying(nn.Module):
    """A half as a layer of an ``nn.Sequential``; the mask travels with the hidden states."""

    def __init__(self, part: Half) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Any) -> Any:
        """Take and return hidden states and mask; the second half returns the logits alone."""
        x, attention_mask = inputs[0] if self.part.is_last else inputs
        x = self.part(x, attention_mask)
        return x if self.part.is_last else (x, attention_mask)


def plain_sequential(name: str, model: Any) -> nn.Sequential:
    """Return the two halves of a model as an ``nn.Sequential``; it shares their parameters."""
    return nn.Sequential(*(Carrying(Half(name, model, is_last=last)) for last in (False, True)))


def untied(name: str, num_tokens: int, *, width: int = WIDTH) -> Any:
    """Build a model whose output layer has a matrix of its own, of the same value."""
    model = model_of(name, num_tokens, width=width)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model
