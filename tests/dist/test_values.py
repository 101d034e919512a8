"""Values of every kind as inputs, between layers and as outputs, with every balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import NoChunk
from tests.dist.stages import (
    MODES,
    Do,
    assert_same,
    assert_same_gradients,
    named,
    plain_step,
    rows,
    stage_of,
)


def check_values(bare, balance):
    """Several inputs, NoChunk, plain values, and outputs that cannot be concatenated."""
    table, x, mask = rows(4), rows(7), (rows(7) > 0)[:, 0]
    model = named(
        first=Do(lambda x, mask, table, scale: (x @ table * scale, mask, "name"), learns=True),
        # One layer of the model, made of several.
        nested=nn.Sequential(
            Do(lambda t: (torch.tanh(t[0]), *t[1:])),
            nn.Sequential(Do(lambda t: (t[0] * t[1][:, None], t[2], len(t[0])))),
        ),
        last=Do(lambda t: {"out": t[0], "name": t[1], "size": t[2], "none": None, "mean": None}),
    )
    assert len(model) == sum(balance)
    inputs = (x, mask, NoChunk(table), 0.5)

    def loss_fn(output, target):
        return F.mse_loss(output["out"], target)

    for mode in MODES:
        options: Any = {"checkpoint": mode, "loss_fn": loss_fn, "chunks": 3}
        with stage_of(bare, mode, model, balance, **options) as stage:
            expected = plain_step(model, inputs, x, 3, loss_fn)
            assert_same(stage.step(*inputs, target=x), expected, "loss")
            assert_same_gradients(stage, model, mode)
            model.zero_grad()
            with torch.no_grad():
                output = stage.fetch(stage(*inputs))
                assert {k: v for k, v in output.items() if k != "out"} == {
                    "name": ["name"] * 3,
                    "size": [3, 3, 1],
                    "none": None,
                    "mean": None,
                }
                assert output["out"].shape == (7, 4)
                # A batch smaller than chunks makes as many micro-batches as it has samples.
                small = (x[:2], mask[:2], *inputs[2:])
                assert stage.fetch(stage(*small))["size"] == [1, 1]
                # The output of a single micro-batch is returned unchanged.
                assert stage.fetch(stage(x[:1], mask[:1], *inputs[2:]))["size"] == 1


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]], ids=str)
def test_values_of_every_kind_as_inputs_and_outputs(ranks, balance):
    ranks(len(balance)).run(check_values, balance, world=False).values()


def check_tuples_as_one_input(bare, balance):
    """A pair or a 1-tuple, passed as one input, is one argument of the first layer."""
    pair = named(first=Do(lambda t: (t[0] * 2, t[1] + 1)), last=Do(lambda t: (t[1], t[0])))
    single = named(first=Do(lambda t: (t[0] * 2,)), last=Do(lambda t: t))
    a, b = rows(5), rows(5)[:, :2]
    for name, model, value in (("pair", pair, (a, b)), ("single", single, (a,))):
        with stage_of(bare, name, model, balance, chunks=2) as stage, torch.no_grad():
            assert_same(stage.fetch(stage(value)), model(value), name)


@pytest.mark.parametrize("balance", [[2], [1, 1]], ids=str)
def test_a_tuple_is_one_input(ranks, balance):
    ranks(len(balance)).run(check_tuples_as_one_input, balance, world=False).values()
