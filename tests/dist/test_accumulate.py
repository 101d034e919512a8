"""``step(x, y, accumulate=n)`` is ``(loss / n).backward()`` of the plain model.

Truth is the plain model over the same micro-batches. With one pipeline every bit is equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import RemoteStageError
from procpipe.losses import masked_cross_entropy
from tests.dist.stages import assert_same, assert_same_gradients, plain_forward, stage_of

pytestmark = pytest.mark.on_gpus

#: Schedule, recomputation, whether backward tasks run from the last micro-batch to the first.
SCHEDULES = [
    ("gpipe", "except_last", True),
    ("1f1b", "never", False),
    ("zb-h1", "always", False),
    ("interleaved", "never", False),
    ("zb-v", "never", False),
]

BALANCES = {1: [6], 2: [2, 4], 3: [1, 2, 3], 4: [2, 1, 2, 1], 6: [1] * 6}


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


def check(bare, schedule, mode, is_reversed, num_partitions):
    balance = BALANCES[bare.num_ranks * num_partitions]
    for n, chunks, weigh, dtype in (
        (4, 1, None, torch.float64),
        (3, 1, None, torch.float64),
        (3, 1, None, torch.float32),
        (4, 3, None, torch.float64),
        (3, 4, None, torch.float64),
        (3, 4, None, torch.float32),
        (5, 3, num_of_class_0, torch.float64),
    ):
        plain = make_model(dtype)
        options: Any = {"chunks": chunks, "schedule": schedule, "checkpoint": mode}
        options |= {"loss_fn": F.cross_entropy, "loss_weight": weigh}
        what = f"{n} of {chunks}, {weigh is not None}, {dtype}"
        with stage_of(bare, what, plain, balance, **options) as stage:
            returned = []
            for input, target in make_batches(n, 9, dtype):
                parts = plain_losses(plain, input, target, chunks, weigh)
                for part in reversed(parts) if is_reversed else parts:
                    (part / n).backward()
                expected = sum(part.detach() for part in parts) / n
                # Rank 0's number counts.
                number: Any = n if bare.rank == 0 else "ignored"
                returned.append(stage.step(input, target, accumulate=number))
                assert_same(returned[-1], expected, what)
                assert_same_gradients(stage, plain)
                weight = len(target) if weigh is None else weigh(target)
                assert stage.last_weight.item() == weight, what
            stage.eval()
            assert_same(stage.step(input, target, accumulate=n), expected, f"eval {what}")
            assert_same(stage.step(input, target), sum(part.detach() for part in parts), what)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("schedule", "mode", "is_reversed"), SCHEDULES)
def test_bits_are_those_of_a_divided_loss(ranks, num_ranks, schedule, mode, is_reversed):
    num_partitions = 2 if schedule in ("interleaved", "zb-v") else 1
    ranks(num_ranks).run(check, schedule, mode, is_reversed, num_partitions, world=False).values()


def check_replicas(bare):
    for loss_fn, weigh in (
        (F.cross_entropy, None),
        (F.cross_entropy, num_of_class_0),
        (masked_cross_entropy, None),
    ):
        plain = make_model()
        options: Any = {"chunks": 2, "schedule": "1f1b", "replicas": 2, "loss_fn": loss_fn}
        options["loss_weight"] = weigh
        what = f"{type(loss_fn).__name__} {weigh is not None}"
        batches = make_batches(5, 8)[::2]  # of 8 samples: two for each of four micro-batches
        with stage_of(bare, what, plain, [2, 4], **options) as stage:
            own = slice(None, 4) if stage.replica == 0 else slice(4, None)
            if weigh is None:  # unequal parts
                own = slice(None, 2) if stage.replica == 0 else slice(2, None)
            loader = [(input[own], target[own]) for input, target in batches]
            items = stage.batches(loader)
            for (input, target), item in zip(batches, items, strict=True):
                loss = F.cross_entropy(plain(input), target)
                if weigh is not None:
                    loss = sum(plain_losses(plain, input, target, 4, weigh))
                (loss / 3).backward()
                found = stage.step(*item, accumulate=3)
                assert_same(found, loss.detach() / 3, what, 1e-12)
                for name, parameter in stage.named_parameters():
                    assert parameter.grad is not None
                    assert_same(parameter.grad.cpu(), plain.get_parameter(name).grad, what, 1e-12)


def test_replicas_divide_the_loss_of_all(ranks):
    ranks(4).run(check_replicas, world=False).values()


def check_what_counts_nothing(bare):
    """A mini-batch of weight 0 adds nothing, also where its loss is NaN."""
    plain = make_model()
    options: Any = {"loss_fn": lambda o, t: F.cross_entropy(o, t, ignore_index=0)}
    options |= {"loss_weight": lambda target: int((target != 0).sum()), "chunks": 2}
    balance = BALANCES[bare.num_ranks]
    with stage_of(bare, "nothing", plain, balance, **options) as stage:
        input, target = make_batches(1, 4)[0]
        with pytest.warns(RuntimeWarning, match="loss_weight is 0"):
            loss = stage.step(input, torch.zeros_like(target), accumulate=3)
        assert loss.item() == 0
        for parameter in stage.parameters():
            assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_mini_batch_of_weight_0(ranks, num_ranks):
    ranks(num_ranks).run(check_what_counts_nothing, world=False).values()


def check_mistake(bare, given, message):
    options: Any = {"chunks": 2, "loss_fn": F.cross_entropy}
    with (
        stage_of(bare, message, make_model(), BALANCES[bare.num_ranks], **options) as stage,
        pytest.raises(ValueError if bare.rank == 0 else RemoteStageError, match=message),
    ):
        stage.step(*make_batches(1, 4)[0], **given)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mistakes_are_one_error_on_every_rank(ranks, num_ranks):
    for number in (True, 0, -1, 2.5, "4", 4.0):
        message = f"accumulate is {number!r}, but must be the number of mini-batches"
        ranks(num_ranks).run(check_mistake, {"accumulate": number}, message, world=False).values()
    message = "accumulate=4 and total_weight=8, of which each says what the loss is divided by"
    both = {"accumulate": 4, "total_weight": 8}
    ranks(num_ranks).run(check_mistake, both, message, world=False).values()
