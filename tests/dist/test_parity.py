"""A pipeline's results equal those of the plain ``nn.Sequential``, bit for bit.

Truth is the plain model in float64 over the same micro-batches, with gradients summed in the plan's
order. Loss, output, the gradient of every parameter and every buffer are compared. The fuzzer
(tests/fuzz) does so for many models and options; these few also run on GPUs.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import pairs
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    plain_backward,
    plain_step,
    stage_of,
)

#: Mini-batch sizes for 1, 2 and 5 micro-batches, the last one smaller if there are several: fewer
#: than there are stages, and more.
BATCHES = {1: 5, 2: 9, 5: 14}

pytestmark = pytest.mark.on_gpus

BALANCES = [[1, 1, 1, 4], [2, 3, 1, 1]]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.0),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
        nn.BatchNorm1d(8, momentum=None),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


def make_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def check_step(bare, balances):
    """``step`` in every mode, with every number of micro-batches, twice without zero_grad."""
    for balance, mode, (chunks, size) in pairs(balances, MODES, BATCHES.items()):
        plain = make_model()
        name = f"step {balance} {mode} {chunks}"
        with stage_of(
            bare,
            name,
            plain,
            balance,
            chunks=chunks,
            checkpoint=mode,
            loss_fn=F.cross_entropy,
        ) as stage:
            for seed in (2, 3):
                inputs, target = make_batch(size, seed)
                expected = plain_step(plain, (inputs,), target, chunks, F.cross_entropy)
                data = (inputs, target) if bare.rank == 0 else ()
                assert_same(stage.step(*data), expected, "loss")
                assert_same_gradients(stage, plain)
                assert_same_state(stage, plain)
            assert set(stage.statistics().num_tasks) == {"F", "B"} | (
                set() if mode == "never" or (mode, chunks) == ("except_last", 1) else {"R"}
            )


def check_forward_and_backward(bare, balances):
    """``stage(input)``, any loss code, ``backward()``: every rank runs the same lines."""
    for balance, mode, (chunks, size) in pairs(balances, MODES, BATCHES.items()):
        plain = make_model()
        name = f"forward {balance} {mode} {chunks}"
        with stage_of(bare, name, plain, balance, chunks=chunks, checkpoint=mode) as stage:
            for seed in (2, 3):
                inputs, target = make_batch(size, seed)
                output = stage(inputs)
                loss = F.cross_entropy(output, target.to(stage.device))
                loss.backward()

                expected, expected_loss = plain_backward(
                    plain, (inputs,), chunks, partial(F.cross_entropy, target=target)
                )
                if bare.rank == bare.num_ranks - 1:
                    assert_same(output.detach(), expected, "output")
                assert_same(stage.fetch(loss), expected_loss, "loss")
                assert_same_gradients(stage, plain)
                assert_same_state(stage, plain)


def test_step(ranks):
    ranks(4).run(check_step, BALANCES, world=False).values()


def test_forward_and_backward(ranks):
    ranks(4).run(check_forward_and_backward, BALANCES, world=False).values()
