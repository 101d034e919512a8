"""The loss of causal language models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from procpipe.losses import MaskedCrossEntropy


class CausalLMLoss(MaskedCrossEntropy):
    """The mean cross entropy of the next tokens.

    For ``Stage(…, loss_fn=hf.causal_lm_loss)``: the loss of a mini-batch then is the mean over all
    tokens of all its micro-batches, as of transformers with ``num_items_in_batch``. In float32, or
    in float64 where the logits are. Models whose labels are not shifted (T5, BERT) take
    ``masked_cross_entropy``.

    Source: ``transformers.loss.loss_utils.ForCausalLMLoss``.
    """

    name = "hf.causal_lm_loss"

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """Return the mean, 0-dim; NaN if no token counts.

        Args:
            output: logits ``(batch, length, vocabulary)``; or these and an auxiliary loss, 0-dim,
                of this micro-batch, which is added to their mean. So over several micro-batches it
                is weighted by tokens; in one mini-batch without micro-batches transformers computes
                it over all tokens at once.
            labels: ``(batch, length)``, int64: the tokens themselves. They are shifted here, so
                that position ``t`` predicts the label at ``t + 1``; -100 does not count.
        """
        logits, auxiliary = output if isinstance(output, tuple) else (output, None)
        mean = super().__call__(logits[:, :-1], labels[:, 1:])
        return mean if auxiliary is None else mean + auxiliary.to(mean.dtype)

    def num_counted(self, labels: Tensor) -> Tensor:
        """Return how many tokens count, 0-dim, int64."""
        return super().num_counted(labels[:, 1:])


causal_lm_loss = CausalLMLoss()
