"""Loss functions that count what they average over, for ``Stage(…, loss_fn=…)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def masked_cross_entropy(
    output: Tensor, target: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the sum of cross entropies of all targets but the ignored ones, and their number.

    As a ``loss_fn`` it makes the mini-batch's loss the mean over all targets that count, however
    they are spread over micro-batches.

    Args:
        output: logits ``(…, classes)``, of any floating-point dtype; half precision is computed in
            float32.
        target: classes ``(…)``, int64.
        ignore_index: the target that does not count.

    Raises:
        ValueError: the shapes do not fit.
    """
    if output.shape[:-1] != target.shape:
        raise ValueError(
            f"the output has shape {tuple(output.shape)} and the target {tuple(target.shape)}, but "
            "must have (…, classes) and (…): where classes are in dim 1, as F.cross_entropy has "
            "them, give output.movedim(1, -1)"
        )
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    logits, classes = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    loss = F.cross_entropy(logits, classes, ignore_index=ignore_index, reduction="sum")
    return loss, (classes != ignore_index).sum()


def causal_lm_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next tokens, as a sum, and how many count.

    For ``Stage(…, loss_fn=hf.causal_lm_loss)``: the loss of a mini-batch then is the sum over all
    its micro-batches by the number of all their tokens, as of transformers with
    ``num_items_in_batch``. In float32, or in float64 where the logits are. Models whose labels are
    not shifted (T5, BERT) take :func:`masked_cross_entropy`.

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
