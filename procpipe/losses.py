"""Loss functions that count what they average over, for ``Stage(…, loss_fn=…)``."""

from __future__ import annotations

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
