"""``step(x, y, accumulate=n)`` is ``(loss / n).backward()`` of the plain model.

Truth is the plain model over the same micro-batches. Every bit is equal, also where n is no power
of two, so that the order of the divisions matters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import RemoteStageError
from tests.dist.stages import assert_same, assert_same_gradients, plain_forward, stage_of

pytestmark = pytest.mark.on_gpus

BALANCES = {1: [6], 2: [2, 4]}


def make_model(dtype=torch.float64):
    torch.manual_seed(1)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.Linear(8, 3)).to(dtype)


def make_batches(num_batches, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size + k % 2, 5, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(3, (size + k % 2,), generator=generator),
        )
        for k in range(num_batches)
    ]


def num_of_class_0(target):
    return int((target == 0).sum())


def plain_losses(plain, input, target, chunks, weigh=None):
    """Return the micro-batches' losses, each with its share, as a user would add them up."""
    outputs, sizes = plain_forward(plain, (input,), chunks)
    targets = target.split(sizes)
    weights = sizes if weigh is None else [weigh(each) for each in targets]
    total = sum(weights)
    return [
        F.cross_entropy(output, each) * (weight / total if total else 0.0)
        for output, each, weight in zip(outputs, targets, weights, strict=True)
    ]


def check(bare):
    for n, chunks, weigh, dtype in (
        (3, 1, None, torch.float32),
        (3, 4, None, torch.float64),
        (3, 4, None, torch.float32),
        (5, 3, num_of_class_0, torch.float64),
    ):
        plain = make_model(dtype)
        options: Any = {"chunks": chunks, "loss_fn": F.cross_entropy, "loss_weight": weigh}
        what = f"{n} of {chunks}, {weigh is not None}, {dtype}"
        with stage_of(bare, what, plain, BALANCES[bare.num_ranks], **options) as stage:
            for input, target in make_batches(n, 9, dtype):
                parts = plain_losses(plain, input, target, chunks, weigh)
                for part in reversed(parts):
                    (part / n).backward()
                expected = sum(part.detach() for part in parts) / n
                # Rank 0's number counts.
                number: Any = n if bare.rank == 0 else "ignored"
                assert_same(stage.step(input, target, accumulate=number), expected, what)
                assert_same_gradients(stage, plain)
                weight = len(target) if weigh is None else weigh(target)
                assert stage.last_weight.item() == weight, what
            stage.eval()
            assert_same(stage.step(input, target, accumulate=n), expected, f"eval {what}")
            assert_same(stage.step(input, target), sum(part.detach() for part in parts), what)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bits_are_those_of_a_divided_loss(ranks, num_ranks):
    ranks(num_ranks).run(check, world=False).values()


def check_mistake(bare, given, message):
    options: Any = {"chunks": 2, "loss_fn": F.cross_entropy}
    with (
        stage_of(bare, message, make_model(), BALANCES[bare.num_ranks], **options) as stage,
        pytest.raises(ValueError if bare.rank == 0 else RemoteStageError, match=message),
    ):
        stage.step(*make_batches(1, 4)[0], **given)


def test_mistakes_are_one_error_on_every_rank(ranks):
    for number in (True, 0, -1, 4.0):
        message = f"accumulate is {number!r}, but must be the number of mini-batches"
        ranks(2).run(check_mistake, {"accumulate": number}, message, world=False).values()
    message = "accumulate=4 and total_weight=8, of which each says what the loss is divided by"
    both = {"accumulate": 4, "total_weight": 8}
    ranks(2).run(check_mistake, both, message, world=False).values()
