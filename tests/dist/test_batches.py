"""Loops over a loader that end early, are in one another, or whose items are changed.

Mini-batches of every size, targets and losses of every kind, evaluation between steps: tests/fuzz.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Remote
from tests.dist.stages import (
    assert_same,
    assert_same_gradients,
    assert_same_state,
    make_batch,
    plain_step,
    stage_of,
)

pytestmark = pytest.mark.on_gpus


def make_model(norm: Any = nn.LayerNorm):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), norm(8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def check_loaders(bare, balance):
    """All ranks read a loader together; rank 0's loader gives the items and their number."""
    last = bare.num_ranks - 1
    plain = make_model()
    items = [make_batch(size, seed) for seed, size in enumerate((10, 3, 7))]
    with stage_of(bare, "loaders", plain, balance, chunks=4, loss_fn=F.cross_entropy) as stage:

        def step_and_compare(input, target, k, what, to_target=lambda target: target):
            expected_target = to_target(items[k][1])
            expected = plain_step(plain, items[k][:1], expected_target, 4, F.cross_entropy)
            assert_same(stage.step(input, target), expected, what)
            assert_same_gradients(stage, plain, what)

        # The loaders of other ranks are not read: they may be of another length.
        other = iter([1, 2])
        num_steps = 0
        for k, (input, target) in enumerate(stage.batches(items if bare.rank == 0 else other)):
            step_and_compare(input, target, k, "untouched")
            assert isinstance(target, Remote) == (bare.rank not in (0, last))
            num_steps += 1
        assert num_steps == 3
        assert list(other) == [1, 2]

        # A loop that ends early, a function that makes a loader, items without a tensor or none.
        for k, (input, target) in enumerate(stage.batches(items)):
            step_and_compare(input, target, k, "early break")
            if k == 1:
                break

        def make():
            assert bare.rank == 0
            return map(list, items)

        for k, item in enumerate(stage.batches(make)):
            assert type(item) is list
            input, target = item
            step_and_compare(input, target, k, "a function")
        assert list(stage.batches([])) == []
        assert len(list(stage.batches(["end", "of"]))) == 2

        # A target that is changed after it was loaded: replaced, or changed in place.
        def one_first(target):
            return torch.cat([torch.ones(1, dtype=target.dtype), target[1:]])

        for k, (input, target) in enumerate(stage.batches(items)):
            step_and_compare(input, 2 - target, k, "another target", lambda t: 2 - t)
        for what, is_here in ("in place", True), ("in place on rank 0", bare.rank == 0):
            for k, (input, target) in enumerate(stage.batches([(x, y.clone()) for x, y in items])):
                if is_here:
                    target[0] = 1
                step_and_compare(input, target, k, what, one_first)


def check_nested(bare):
    """Evaluate in a loop inside the loop that trains."""
    plain = make_model(nn.BatchNorm1d)
    items = [make_batch(size, seed) for seed, size in enumerate((10, 6))]

    def step_and_compare(input, target, item):
        expected = plain_step(plain, item[:1], item[1], 3, F.cross_entropy)
        assert_same(stage.step(input, target), expected, "loss")

    with stage_of(bare, "nested", plain, [2, 3], chunks=3, loss_fn=F.cross_entropy) as stage:
        for item, (input, target) in zip(items, stage.batches(items), strict=True):
            step_and_compare(input, target, item)
            stage.eval()
            plain.eval()
            with torch.no_grad():
                for inner, (x, y) in zip(items, stage.batches(items), strict=True):
                    step_and_compare(x, y, inner)
            stage.train()
            plain.train()
            assert_same_gradients(stage, plain)
            assert_same_state(stage, plain)


@pytest.mark.parametrize("balance", [[5], [1, 1, 3]], ids=str)
def test_loaders(ranks, balance):
    ranks(len(balance)).run(check_loaders, balance, world=False).values()


def test_a_loop_inside_a_loop(ranks):
    ranks(2).run(check_nested, world=False).values()
