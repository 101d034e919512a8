"""Detects changes of parameters and buffers between a first forward and its recomputation.

    F(i)   ── note ────────────>  as the layers left them: parameters, buffers
           stage(x) has returned: optimizer.step(), load_state_dict(); or a hook of another
           micro-batch's backward pass has run an optimizer
    R(i)   <── compare ─────────  as they are now

Without recomputation autograd refuses such a backward pass, as what it saved was written to; with
it, the gradients would be those of another function. Changes by layers in their own forwards
(``nn.Embedding(max_norm=…)``) are allowed. A change past autograd (``weight.data``, the fused
optimizers of torch 2.13) raises no version, and is not detected.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def sum_of_versions(tensors: Iterable[Tensor]) -> int:
    """Return a number that rises with each change in place of any of these tensors."""
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())
