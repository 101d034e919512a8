"""Containers of registered classes as inputs, outputs, between stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Remote
from procpipe.skip import pop, skippable, stash
from tests.dist.stages import assert_same, assert_same_gradients, plain_step, stage_of
from tests.dist.test_boundaries import Do, rows
from tests.test_tree import Encoding, NotRegistered, Output, Pair, Registered

pytestmark = pytest.mark.on_gpus


# -- targets, loaders, skips, fetch ----------------------------------------------------------------


@skippable(stash=["kept"])
class Keep(nn.Linear):
    def forward(self, x):
        yield stash("kept", x)
        return Output(super().forward(x), x)


@skippable(pop=["kept"])
class Use(nn.Linear):
    def forward(self, output):
        kept = yield pop("kept")
        return Registered(super().forward(output.loss) + kept, None, 1)


def cross_entropy(output: Any, target: Any) -> Tensor:
    assert isinstance(output, Registered)
    assert isinstance(target, Pair)
    loss: Tensor = (F.cross_entropy(output.a, target.x, reduction="none") * target.y).mean()
    return loss


def check_targets_and_loader(bare, num_ranks):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(Keep(4, 4), Do(lambda o: o), Use(4, 4))
    balance = [3] if num_ranks == 1 else [1, 1, 1]
    target = Pair(torch.arange(7) % 4, torch.rand(7))
    batch = Pair(rows(), target)
    last = num_ranks - 1
    with stage_of(bare, "all", model, balance, chunks=3, loss_fn=cross_entropy) as stage:
        expected = plain_step(model, (batch.x,), target, 3, cross_entropy)
        assert_same(stage.step(batch.x, target), expected, "loss")
        assert_same_gradients(stage, model, "routed target")
        for item in stage.batches([batch, batch]):
            assert type(item) is Pair
            assert isinstance(item.x, Tensor if bare.rank == 0 else Remote)
            assert isinstance(item.y, Pair if bare.rank in (0, last) else (Pair, Remote))
            stage.zero_grad()
            assert_same(stage.step(*item), expected, "loss of a delivered target")
            assert_same_gradients(stage, model, "delivered target")
            output = stage(item.x)
            if num_ranks > 1 and bare.rank != last:
                assert isinstance(output.a, Remote)
            fetched = stage.fetch(Output(loss=output.a))
            assert type(fetched) is Output
            assert fetched.loss.shape == (7, 4)
        for item in stage.batches([Encoding({"x": batch.x, "n": 1})]):
            is_moved = bare.rank == last and bare.device.type != "cpu"
            assert type(item) is (Encoding if bare.rank == 0 and not is_moved else dict)
            assert isinstance(item["x"], Tensor if bare.rank in (0, last) else Remote)
        for item in stage.batches([NotRegistered()]):  # cannot be sent, and is not
            assert bare.rank == 0 or isinstance(item, Remote)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_targets_loaders_skips_and_fetched_values(ranks, num_ranks):
    ranks(num_ranks).run(check_targets_and_loader, num_ranks, world=False).values()
