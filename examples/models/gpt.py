"""GPT in sequential form: attention and feed-forward are layers, each with its residual inside.

    tokens ─> embedding ─> attention0 ─> feed_forward0 ─> attention1 ─> ... ─> norm ─> head

So one tensor passes between any two layers: ``(batch, time, d_model)`` float.

The head has weights of its own: GPT-2 uses the embedding's, which would have to be on the first
and on the last stage.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019),
Section 2.3.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

STD = 0.02  # of the initial weights


def gpt(
    vocab_size: int, num_layers: int, d_model: int, num_heads: int, context: int
) -> nn.Sequential:
    """Build a GPT.

    Input: tokens, ``(batch, time)`` int64, ``time`` at most ``context``. Output: logits of the
    token after each, ``(batch, time, vocab_size)`` float.

    Args:
        vocab_size: number of different tokens.
        num_layers: blocks, each of one attention and one feed-forward layer.
        d_model: length of the vector at each place; a multiple of ``num_heads``.
        num_heads: heads of each attention.
        context: tokens that a prediction depends on at most.

    Raises:
        ValueError: ``d_model`` is no multiple of ``num_heads``.
    """
    if d_model % num_heads:
        raise ValueError(f"d_model is {d_model}: make it a multiple of num_heads, {num_heads}")
    # All layers add to the same vector, so with more layers each adds less.
    output_std = STD / math.sqrt(2 * num_layers)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=Embedding(vocab_size, d_model, context)
    )
    for block in range(num_layers):
        layers[f"attention{block}"] = Attention(d_model, num_heads, output_std)
        layers[f"feed_forward{block}"] = FeedForward(d_model, output_std)
    layers["norm"] = nn.LayerNorm(d_model)
    layers["head"] = nn.Linear(d_model, vocab_size, bias=False)
    return nn.Sequential(layers)


class Embedding(nn.Module):
    """Embeds tokens and their positions."""

    def __init__(self, vocab_size: int, d_model: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, d_model)
        self.place = nn.Embedding(context, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise with small vectors; called for a model built on the meta device too."""
        nn.init.normal_(self.token.weight, std=STD)
        nn.init.normal_(self.place.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, time)`` int64 to ``(batch, time, d_model)`` float."""
        time, context = tokens.shape[1], self.place.num_embeddings
        if time > context:
            raise ValueError(f"{time} tokens, but the context is {context}: pass the last of them")
        embedded: Tensor = self.token(tokens) + self.place.weight[:time]
        return embedded


class Attention(nn.Module):
    """Adds causal self-attention to each position."""

    def __init__(self, d_model: int, num_heads: int, output_std: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.output_std = output_std
        self.norm = nn.LayerNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise with small weights; called for a model built on the meta device too."""
        _reset_linear(self.query_key_value, STD)
        _reset_linear(self.output, self.output_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, d_model)`` float to the same."""
        heads = self.query_key_value(self.norm(x)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        gathered = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(gathered.transpose(1, 2).flatten(2))
        return x + output


class FeedForward(nn.Module):
    """Adds a feed-forward network of each position."""

    def __init__(self, d_model: int, output_std: float) -> None:
        super().__init__()
        self.output_std = output_std
        self.norm = nn.LayerNorm(d_model)
        self.widen = nn.Linear(d_model, 4 * d_model)
        self.output = nn.Linear(4 * d_model, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise with small weights; called for a model built on the meta device too."""
        _reset_linear(self.widen, STD)
        _reset_linear(self.output, self.output_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, d_model)`` float to the same."""
        output: Tensor = self.output(F.gelu(self.widen(self.norm(x)), approximate="tanh"))
        return x + output


def _reset_linear(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
