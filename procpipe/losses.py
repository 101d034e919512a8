"""Loss functions that say what they average over, for ``Stage(…, loss_fn=…)``.

``num_counted(target)`` is what one micro-batch counts in the mean over the mini-batch. A loss
function of your own may have this method, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from procpipe.data.loss import IGNORED, check_weighted


class MaskedCrossEntropy:
    """The mean cross entropy of all targets but the ignored ones.

    As a ``loss_fn`` it makes the mini-batch's loss the mean over all targets that count, however
    they are spread over micro-batches.

    Args:
        ignore_index: the target that does not count.
    """

    name = "masked_cross_entropy"

    def __init__(self, ignore_index: int = IGNORED) -> None:
        self.ignore_index = ignore_index

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean, 0-dim; NaN if nothing counts.

        Args:
            output: logits ``(…, classes)``, of any floating-point dtype; half precision is computed
                in float32.
            target: classes ``(…)``, int64.

        Raises:
            ValueError: the shapes do not fit.
            TypeError: it is called by the ``loss_fn`` of a stage without ``loss_weight``.
        """
        check_weighted(self.name)
        if output.shape[:-1] != target.shape:
            raise ValueError(
                f"the output has shape {tuple(output.shape)} and the target {tuple(target.shape)}, "
                "but must have (…, classes) and (…): where classes are in dim 1, as "
                "F.cross_entropy has them, give output.movedim(1, -1)"
            )
        if output.dtype in (torch.float16, torch.bfloat16):
            output = output.float()
        logits, classes = output.reshape(-1, output.shape[-1]), target.reshape(-1)
        return F.cross_entropy(logits, classes, ignore_index=self.ignore_index)

    def num_counted(self, target: Tensor) -> Tensor:
        """Return how many targets count, 0-dim, int64."""
        return (target != self.ignore_index).sum()


masked_cross_entropy = MaskedCrossEntropy()
