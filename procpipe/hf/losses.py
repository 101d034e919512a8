"""Losses of language models that weigh tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: The label of a token that does not count.
IGNORED = -100


def causal_lm_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next tokens, as a sum, and how many count.

    For ``Stage(…, loss_fn=hf.causal_lm_loss)``: the loss of a mini-batch then is the sum over all
    its micro-batches by the number of all their tokens, as of transformers with
    ``num_items_in_batch``. Computed in float32, or float64 for logits of float64.

    Args:
        output: logits ``(batch, length, vocabulary)``; or these and an auxiliary loss, 0-dim, which
            is multiplied by the number of tokens: so it counts as in the mean over the tokens.
        labels: ``(batch, length)``, int64: the tokens themselves. They are shifted here, so that
            position ``t`` predicts the label at ``t + 1``; -100 does not count.

    Returns:
        the sum, 0-dim, and the number of tokens that count, 0-dim, int64.

    Source: ``transformers.loss.loss_utils.ForCausalLMLoss``.
    """
    logits, auxiliary = output if isinstance(output, tuple) else (output, None)
    return _token_loss(logits[:, :-1], labels[:, 1:], auxiliary)


def seq2seq_lm_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the tokens at the same positions, as a sum, and how many count.

    For models with an encoder, whose decoder's input is shifted already; and for masked language
    models and the classification of tokens. See :func:`causal_lm_loss`.
    """
    return _token_loss(output, labels, None)


def _token_loss(logits: Tensor, labels: Tensor, auxiliary: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    labels = labels.to(logits.device).flatten()
    total = F.cross_entropy(
        logits.flatten(0, -2).to(dtype), labels, ignore_index=IGNORED, reduction="sum"
    )
    count = (labels != IGNORED).sum()
    if auxiliary is not None:
        total = total + count * auxiliary.to(dtype)
    return total, count
