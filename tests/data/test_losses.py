"""Losses that say how many tokens they count, and what is left out of a loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from procpipe.data.loss import Loss, MeanLoss
from procpipe.losses import MaskedCrossEntropy, masked_cross_entropy


def test_classes_in_another_dim_are_refused():
    output = torch.zeros(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"movedim\(1, -1\)"):
        masked_cross_entropy(output, torch.zeros(2, 4, 4, dtype=torch.long))
    target = torch.arange(32).view(2, 4, 4) % 3
    loss_fn = MaskedCrossEntropy(ignore_index=1)
    assert loss_fn.num_counted(target) == 21
    assert loss_fn(output.movedim(1, -1), target).item() == pytest.approx(math.log(3))


def test_half_precision_is_averaged_in_float32():
    output = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert masked_cross_entropy(output, torch.zeros(3, dtype=torch.long)).dtype == torch.float32


def mean_of_valid(output, target):
    """Divide 0 by 0 where nothing is valid, forward and backward."""
    is_valid = target >= 0
    losses = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (losses * is_valid).sum() / is_valid.sum()


@pytest.mark.parametrize(
    "loss_fn",
    [
        mean_of_valid,
        lambda output, target: output.new_tensor(math.nan),
        lambda output, target: mean_of_valid(output.mul_(2).log_softmax(-1), target),
    ],
    ids=["not a number", "constant", "changing its output"],
)
def test_a_micro_batch_that_is_left_out_adds_nothing(loss_fn):
    weight = torch.ones(3, requires_grad=True)
    output, target = torch.randn(2, 3) * weight, torch.tensor([-1, -1])
    loss = Loss(loss_fn, len, must_be_finite=True).of(output, target, is_left_out=True)
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "int64", "bool"])
def test_the_loss_is_the_sum_of_products_in_order_to_the_last_bit(name):
    dtype = getattr(torch, name)
    losses = (torch.rand(61, dtype=torch.float64) * 3).to(dtype).unbind()
    weights = [float(k % 7) for k in range(61)]
    whole = sum(weights)
    expected = losses[0] * 0.0
    for loss, weight in zip(losses, weights, strict=True):
        expected += loss * (weight / whole)
    mean = MeanLoss(Loss(F.mse_loss, None), [None] * 61, weights, lambda: whole)
    found, _ = mean.part(dict(enumerate(losses)))
    assert found.dtype == expected.dtype
    assert found.equal(expected)
