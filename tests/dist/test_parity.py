"""A pipeline's results equal those of the plain ``nn.Sequential``, bit for bit.

Truth is the plain model in float64 over the same micro-batches, with gradients summed in the plan's
order. Loss, output, the gradient of every parameter and every buffer are compared.
"""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import pairs
from tests.dist.devices import some_of
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    plain_backward,
    plain_output,
    plain_step,
    stage_of,
)

#: Mini-batch sizes for 1, 2 and 5 micro-batches, the last one smaller if there are several: fewer
#: than there are stages, and more.
BATCHES = {1: 5, 2: 9, 5: 14}

pytestmark = pytest.mark.on_gpus

BALANCES = {
    1: [[7]],
    2: [[1, 6], [4, 3]],
    3: [[2, 2, 3], [4, 1, 2]],
    4: [[1, 1, 1, 4], [3, 1, 1, 2], [2, 3, 1, 1]],
}

EVERY_NUMBER_OF_RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])


class Counting(nn.Module):
    """Counts its forwards in place and uses the count in its output."""

    count: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, input):
        self.count.add_(1)
        return input * (1.0 + 0.125 * self.count.item())


class Averaging(nn.Module):
    """Subtracts a moving average, which it replaces in every forward."""

    average: torch.Tensor
    untouched: torch.Tensor

    def __init__(self, num_features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(num_features))
        self.register_buffer("average", torch.zeros(num_features))
        self.register_buffer("untouched", torch.ones(num_features))

    def forward(self, input):
        self.average = 0.5 * self.average + 0.5 * input.detach().mean(0)
        return self.weight * (input - self.average) * self.untouched


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8),
        Counting(),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
        Averaging(8),
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


def check_batch_norm(bare, balance):
    """Running statistics change once a micro-batch, and not again in recomputation."""
    torch.manual_seed(1)
    plain = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Flatten()
    ).double()
    inputs = torch.randn(8, 1, 5, 5, dtype=torch.float64)
    for mode in MODES:
        truth = copy.deepcopy(plain)
        with stage_of(
            bare, mode, plain, balance, chunks=4, checkpoint=mode, loss_fn=lambda x: x.pow(3).mean()
        ) as stage:
            for num_steps in (1, 2, 3):
                expected = plain_step(truth, (inputs,), None, 4, lambda x: x.pow(3).mean())
                assert_same(stage.step(inputs), expected, "loss")
                assert_same_state(stage, truth)
                assert_same_gradients(stage, truth)
                if "1.num_batches_tracked" in stage.state_dict():
                    assert stage.get_buffer("1.num_batches_tracked") == 4 * num_steps


def run_with_dropout(bare, balances):
    """Return loss, output and gradients of this stage for each mode and way of calling."""
    results = []
    for balance, style in some_of(product(balances, ("step", "forward"))):
        for mode in MODES:
            torch.manual_seed(1)
            model = nn.Sequential(
                nn.Linear(6, 16),
                nn.Dropout(0.5),
                nn.Linear(16, 16),
                nn.Sequential(nn.Dropout(0.3), nn.Tanh(), nn.AlphaDropout(0.2)),
                nn.Linear(16, 2),
            ).double()
            inputs, target = torch.randn(12, 6).double(), torch.randn(12, 2).double()
            torch.manual_seed(7 + bare.rank)
            with stage_of(
                bare,
                f"dropout {balance} {style} {mode}",
                model,
                balance,
                chunks=3,
                checkpoint=mode,
                loss_fn=F.mse_loss,
            ) as stage:
                values = []
                for _ in range(2):
                    if style == "step":
                        values.append(stage.step(inputs, target))
                    else:
                        loss = F.mse_loss(stage(inputs), target.to(stage.device))
                        loss.backward()
                        values.append(stage.fetch(loss))
                gradients = {name: p.grad for name, p in stage.named_parameters()}
                after = torch.rand(3)  # the generator's state does not depend on the mode
            results.append((str(balance), style, mode, values, gradients, after))
    return results


def losses_of_training(bare, balance):
    """Train a few steps; return the losses, which every rank has."""
    plain = make_model()
    with stage_of(bare, str(balance), plain, balance, chunks=4, loss_fn=F.cross_entropy) as stage:
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05)
        losses = []
        for seed in range(6):
            optimizer.zero_grad()
            losses.append(stage.step(*make_batch(12, seed)).item())
            stage.clip_grad_norm_(1.0)
            optimizer.step()
        stage.eval()
        losses.append(stage.step(*make_batch(12, 9)).item())
        return losses


def test_the_comparison_can_fail():
    """The comparison itself can fail: other micro-batches give other bits."""
    plain, other = make_model(), make_model()
    inputs, target = make_batch(9, 2)
    plain_step(plain, (inputs,), target, 2, F.cross_entropy)
    plain_step(other, (inputs,), target, 3, F.cross_entropy)
    with pytest.raises(AssertionError, match=r"gradient of 0.weight: off by"):
        assert_same_gradients(plain, other)
    with pytest.raises(AssertionError, match=r"1.running_mean: off by"):
        assert_same_state(plain, other)
    assert plain_output(plain, (inputs,), 2).shape == (9, 3)


@EVERY_NUMBER_OF_RANKS
def test_step(ranks, num_ranks):
    ranks(num_ranks).run(check_step, BALANCES[num_ranks], world=False).values()


@EVERY_NUMBER_OF_RANKS
def test_forward_and_backward(ranks, num_ranks):
    outcomes = ranks(num_ranks).run(check_forward_and_backward, BALANCES[num_ranks], world=False)
    outcomes.values()


@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 2], [1, 1, 1, 1]], ids=str)
def test_batch_norm_counts_each_micro_batch_once(ranks, balance):
    ranks(len(balance)).run(check_batch_norm, balance, world=False).values()


@pytest.mark.parametrize("balances", [[[5]], [[2, 3], [4, 1]], [[1, 1, 3]]], ids=str)
def test_dropout_is_the_same_in_recomputation(ranks, balances):
    for results in ranks(len(balances[0])).run(run_with_dropout, balances, world=False).values():
        for start in range(0, len(results), len(MODES)):
            always, except_last, never = results[start : start + len(MODES)]
            assert (always[2], except_last[2], never[2]) == MODES
            assert_same(always[3:], never[3:], f"always {always[:2]}")
            assert_same(except_last[3:], never[3:], f"except_last {except_last[:2]}")


def test_the_same_result_for_any_number_of_stages(ranks):
    balances = [[7], [3, 4], [6, 1], [1, 2, 4], [2, 1, 3, 1]]
    results = [
        ranks(len(balance)).run(losses_of_training, balance, world=False).values()
        for balance in balances
    ]
    expected = results[0][0]
    assert len(set(expected)) == 7
    for balance, values in zip(balances, results, strict=True):
        assert values == [expected] * len(balance), balance
