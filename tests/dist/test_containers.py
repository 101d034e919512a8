"""Containers of registered classes as inputs, outputs, between stages."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import NoChunk, Remote
from procpipe.skip import pop, skippable, stash
from tests.cases import pairs
from tests.dist.stages import MODES, assert_same, assert_same_gradients, plain_step, stage_of
from tests.dist.test_boundaries import Case, Do, check_case, rows
from tests.test_tree import Encoding, NotRegistered, Output, Pair, Registered

pytestmark = pytest.mark.on_gpus


def cases() -> dict[str, Case]:
    x = rows()
    return {
        "dataclasses and named tuples": Case(
            (
                Do(lambda f, x: Output(f(x), Pair(x, Output(f(x), 3))), 4),
                Do(lambda f, o: dataclasses.replace(o, loss=f(o.loss) + o.hidden.y.loss), 4),
                Do(lambda f, o: Pair(f(o.loss) + o.hidden.x, o.hidden.y), 4),
            ),
            (x,),
        ),
        "dicts": Case(
            (
                Do(lambda f, e: collections.OrderedDict(h=f(e["x"]) * e["scale"], e={3: e}), 4),
                Do(lambda f, d: (d.move_to_end("h"), {**d["e"][3], "g": f(d["h"]), "h": d})[1], 4),
                Do(lambda f, e: collections.OrderedDict(e=f(e["g"]) + e["h"]["h"] * e["scale"]), 4),
            ),
            ({"x": x, "scale": x.exp(), "table": NoChunk(rows(2))},),
        ),
        "registered types": Case(
            (
                Do(lambda f, x: Registered(f(x), x, [0.5, "tanh"]), 4),
                Do(lambda f, r: Output(f(r.a) * r.scale[0], Pair(*f(r.b).topk(2))), 4),
                Do(lambda f, d: f(d.loss)[:, :2] + d.hidden.x * d.hidden.y, 4),
            ),
            (x,),
        ),
    }


def check_boundaries(bare):
    torch.set_default_dtype(torch.float64)
    for (name, case), mode, chunks in pairs(cases().items(), MODES, (1, 3)):
        check_case(bare, f"{name}, {mode}, {chunks} chunks", case, mode, chunks)


def test_containers_between_stages(ranks):
    ranks(3).run(check_boundaries, world=False).values()


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
