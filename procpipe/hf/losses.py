"""The loss of causal language models, which weighs tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from procpipe.losses import masked_cross_entropy


def causal_lm_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next tokens, as a sum, and how many count.

    For ``Stage(…, loss_fn=hf.causal_lm_loss)``: the loss of a mini-batch then is the sum over all
    its micro-batches by the number of all their tokens, as of transformers with
    ``num_items_in_batch``. In float32, or in float64 where the logits are. Models whose labels are
    not shifted (T5, BERT) take :func:`procpipe.losses.masked_cross_entropy`.

    Args:
        output: logits ``(batch, length, vocabulary)``; or these and an auxiliary loss, 0-dim, of
            this micro-batch, which counts as many times as there are tokens: so it is added to
            their mean. Over several micro-batches its mean is weighted by tokens; in one
            mini-batch without micro-batches transformers computes it over all tokens at once.
        labels: ``(batch, length)``, int64: the tokens themselves. They are shifted here, so that
            position ``t`` predicts the label at ``t + 1``; -100 does not count.

    Returns:
        the sum, 0-dim, and the number of tokens that count, 0-dim, int64.

    Source: ``transformers.loss.loss_utils.ForCausalLMLoss``.
    """
    logits, auxiliary = output if isinstance(output, tuple) else (output, None)
    total, count = masked_cross_entropy(logits[:, :-1], labels[:, 1:])
    if auxiliary is not None:
        total = total + count * auxiliary.to(total.dtype)
    return total, count
