"""Named inputs, and losses that count: the mean over all tokens that are not ignored.

Truth is the plain model in float64 over the whole mini-batch, whose loss is a mean over its tokens.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from procpipe.losses import masked_cross_entropy
from tests.dist.stages import assert_same, stage_of
from tests.dist.test_replicas import mean_loss

pytestmark = pytest.mark.on_gpus

TOLERANCE = 1e-12

#: How many tokens of each sample count; of micro-batches of 2, 2, 2 and 1 samples.
SOME, ALL = [5, 3, 0, 0, 1, 0, 4], [5, 5, 5, 5, 5, 5, 5]


class Embed(nn.Module):
    """Takes its inputs by name or position, some of which need not be given."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, input_ids, attention_mask=None, scale=1.0, *, bias=None):
        output = self.embedding(input_ids) * scale
        if attention_mask is not None:
            output = output * attention_mask[..., None]
        return output if bias is None else output + bias


def make_model():
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11)]
    return nn.Sequential(Embed(), *layers).double()


def make_batch(counts, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (7, 5), generator=generator)
    labels = torch.where(torch.arange(5) < torch.tensor(counts)[:, None], tokens.flip(1), -100)
    mask = (torch.rand(7, 5, generator=generator) < 0.8).double()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def plain_loss(plain, batch, **more):
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    value = plain[0](**inputs, **more)
    for layer in plain[1:]:
        value = layer(value)
    return mean_loss(value, batch["labels"])


BALANCES = {1: [6], 2: [4, 2], 3: [1, 2, 3]}


def check_ways_to_give(bare):
    """Ways to name values, and to give the target, with the same result; more: tests/fuzz."""
    plain = make_model()
    batch = make_batch(SOME)
    expected = plain_loss(plain, batch).detach()
    doubled = plain_loss(plain, batch, scale=2.0).detach()
    balance = BALANCES[bare.num_ranks]

    with stage_of(bare, "ways", plain, balance, chunks=3, loss_fn=masked_cross_entropy) as stage:
        stage.eval()
        tokens, mask, labels = batch.values()
        ways = {
            "labels": lambda: stage.step(**batch),
            "second of two": lambda: stage.step(tokens, labels, attention_mask=mask),
            "first by position": lambda: stage.step(
                tokens, attention_mask=mask, labels=labels, scale=1.0
            ),
            "nothing elsewhere": lambda: stage.step(**(batch if bare.rank == 0 else {})),
        }
        for way, step in ways.items():
            assert_same(step(), expected, way, TOLERANCE)
        assert_same(stage.step(**batch, scale=2.0), doubled, "plain value", TOLERANCE)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_values_by_name(ranks, num_ranks):
    ranks(num_ranks).run(check_ways_to_give, world=False).values()


def check_warning(bare, where):
    """The rank that has the target warns, once, if it holds -100 and nothing says what counts."""
    batch = make_batch(ALL)
    with stage_of(bare, where, make_model(), [4, 2], chunks=2, loss_fn=mean_loss) as stage:
        labels = batch.pop("labels")
        given = {"rank 0": bare.rank == 0, "last": bare.rank == 1}.get(where, True)
        for k in range(3):
            target = labels.clone()
            if k:
                target[0, 0] = -100
            should_warn = k == 1 and bare.rank == (1 if where == "last" else 0)
            warned = pytest.warns(RuntimeWarning, match="a target holds -100")
            with warned if should_warn else contextlib.nullcontext():
                if where == "batches":
                    for item in stage.batches([{**batch, "labels": target}]):
                        stage.step(**item)
                else:
                    stage.step(**batch, target=target if given else None)


@pytest.mark.parametrize("where", ["rank 0", "last", "batches"])
def test_ignored_targets_without_a_weight(ranks, where):
    ranks(2).run(check_warning, where, world=False).values()
