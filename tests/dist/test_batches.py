"""Loops over a loader, and mini-batches that count nothing.

Mini-batches of every size, targets and losses of every kind, evaluation between steps: tests/fuzz.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Remote, Stage
from tests.dist.stages import (
    assert_same,
    assert_same_gradients,
    assert_same_state,
    plain_step,
    stage_of,
)

pytestmark = pytest.mark.on_gpus


def make_model(norm: Any = nn.LayerNorm):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 8), norm(8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def make_batch(size, seed=2):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


# -- loaders -------------------------------------------------------------------------------------


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
        untouched = iter([1, 2])
        for name, loader in (
            ("of other lengths", items if bare.rank == 0 else items[: bare.rank % 2] * 9),
            ("untouched", iter(items) if bare.rank == 0 else untouched),
        ):
            num_steps = 0
            for k, (input, target) in enumerate(stage.batches(loader)):
                step_and_compare(input, target, k, name)
                if bare.rank not in (0, last):
                    assert isinstance(target, Remote)
                if bare.rank == last:
                    assert_same(target, items[k][1], "target on the last stage")
                num_steps += 1
            assert num_steps == 3, name
        assert bare.rank == 0 or list(untouched) == [1, 2]

        # A loop that ends early, then others of other forms.
        for k, (input, target) in enumerate(stage.batches(items)):
            step_and_compare(input, target, k, "early break")
            if k == 1:
                break
        for k, item in enumerate(stage.batches([list(item) for item in items])):
            assert type(item) is list
            input, target = item
            step_and_compare(input, target, k, "lists")
        for k, item in enumerate(
            stage.batches({"y": y, "x": x, 3: k} for k, (x, y) in enumerate(items))
        ):
            assert list(item) == ["y", "x", 3]
            step_and_compare(item["x"], item["y"], k, "dicts")
        assert list(stage.batches([])) == []
        assert len(list(stage.batches(["end", "of"]))) == 2

        # Three entries: all but the first are real on the last stage.
        for input, target, extra in stage.batches((x, y, {"x": x}) for x, y in items):
            if bare.rank == last:
                assert_same(extra["x"].shape[0], len(target), "third entry")
            stage.step(input, target)
        stage.zero_grad()
        plain.zero_grad()

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


def check_nested(bare, balance):
    """Evaluate in a loop inside the loop that trains."""
    plain = make_model(nn.BatchNorm1d)
    items = [make_batch(size, seed) for seed, size in enumerate((10, 6))]
    with stage_of(bare, "nested", plain, balance, chunks=3, loss_fn=F.cross_entropy) as stage:
        for k, (input, target) in enumerate(stage.batches(items)):
            expected = plain_step(plain, items[k][:1], items[k][1], 3, F.cross_entropy)
            assert_same(stage.step(input, target), expected, "training")
            stage.eval()
            plain.eval()
            with torch.no_grad():
                for n, (x, y) in enumerate(stage.batches(items)):
                    expected = plain_step(plain, items[n][:1], items[n][1], 3, F.cross_entropy)
                    assert_same(stage.step(x, y), expected, "evaluation")
            stage.train()
            plain.train()
            assert_same_gradients(stage, plain)
            assert_same_state(stage, plain)


@pytest.mark.parametrize("balance", [[5], [1, 1, 3]], ids=str)
def test_loaders(ranks, balance):
    ranks(len(balance)).run(check_loaders, balance, world=False).values()


def test_a_loop_inside_a_loop(ranks):
    ranks(2).run(check_nested, [2, 3], world=False).values()


def read_from_a_function(world: Any) -> int:
    def make() -> list[Any]:
        made.append(world.rank)
        return [(torch.ones(4, 6), torch.ones(4, 6))] * 3

    made: list[int] = []
    stage = Stage(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), [1, 1], loss_fn=F.mse_loss, world=world
    )
    assert len([stage.step(x, y) for x, y in stage.batches(make)]) == 3
    return len(made)


def test_a_loader_function_is_called_on_rank_0_only(ranks: Any) -> None:
    assert ranks(2).run(read_from_a_function).values() == [1, 0]
