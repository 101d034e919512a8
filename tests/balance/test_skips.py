"""Skippable layers, profiled one at a time."""

from __future__ import annotations

import torch
from torch import nn

from procpipe.balance import balance_by_size, balance_by_time
from procpipe.skip import pop, skippable, stash
from tests.balance.layers import float32, held_bytes, layer_times


@skippable(stash={"skip": 2})
class Stash(nn.Module):
    """Stashes a tensor that it computes for its output."""

    def forward(self, x):
        hidden = x.exp()
        yield stash("skip", hidden)
        return hidden.sin()


@skippable(stash=["none"])
class StashNone(nn.Module):
    def forward(self, x):
        yield stash("none", None)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Changes the popped tensor in place."""

    def forward(self, x):
        skip = yield pop("skip")
        assert skip.requires_grad
        return x * skip.mul_(0.5)


@skippable(pop=["none"])
class PopNone(nn.Module):
    def forward(self, x):
        skip = yield pop("none")
        assert skip is None
        return x


def model():
    return nn.Sequential(nn.Linear(8, 8), Stash(), StashNone(), Pop(), PopNone(), Pop())


def test_a_model_with_skips_is_profiled():
    sample = torch.rand(4, 8)
    tensor_bytes = float32(4, 8)

    assert len(layer_times(model(), sample)) == 6
    sizes = held_bytes(model(), sample)
    # Stash makes exp(x), saved and stashed, and its sine. Pop saves its inputs; its own output.
    assert sizes == [tensor_bytes, 2 * tensor_bytes, 0, tensor_bytes, 0, tensor_bytes]
    assert sum(balance_by_time(3, model(), sample, timeout=0)) == 6
    assert balance_by_size(2, model(), sample, param_scale=0) == [2, 4]


def test_backward_ends_at_a_popped_tensor_and_covers_a_stashed_one():
    calls = []

    @skippable(stash=["aside"])
    class Aside(nn.Module):
        def forward(self, x):
            aside = x * 2
            aside.register_hook(lambda gradient: calls.append("aside"))
            yield stash("aside", aside)
            return x.clone()

    @skippable(pop=["aside"])
    class Join(nn.Module):
        def forward(self, x):
            aside = yield pop("aside")
            y = x + aside
            y.register_hook(lambda gradient: calls.append("join"))
            return y

    sample = torch.rand(2, requires_grad=True)
    layer_times(nn.Sequential(Aside(), nn.Identity(), Join()), sample)

    assert calls == ["aside", "join"] * 2  # the second round is the measured one
