"""What each checkpoint mode keeps of a micro-batch's autograd graph."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.stages import MODES, stage_of


class Held(torch.autograd.Function):
    """Notes weak references to its graphs."""

    @staticmethod
    def forward(ctx, input, alive):
        ctx.token = type("Token", (), {})()
        alive.append(weakref.ref(ctx.token))
        return input.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.alive: list[weakref.ref[Any]] = []

    def forward(self, input):
        return Held.apply(input * self.weight, self.alive)


def num_graphs_between(bare, chunks, num_rows):
    """Count this stage's graphs that are alive between forward and backward, by mode."""
    found: dict[str, Any] = {}
    for mode in MODES:
        model = nn.Sequential(*(Holding() for _ in range(bare.num_ranks)))
        balance = [1] * bare.num_ranks
        with stage_of(bare, mode, model, balance, chunks=chunks, checkpoint=mode) as stage:
            output = stage(torch.ones(num_rows, 2))
            gc.collect()
            layer: Any = stage[0]
            found[mode] = sum(reference() is not None for reference in layer.alive)
            output.sum().backward()
            del output
            gc.collect()
            assert not any(reference() for reference in layer.alive), mode
    return found


@pytest.mark.parametrize(
    ("chunks", "num_rows", "expected"),
    [
        (4, 3, {"always": 0, "except_last": 1, "never": 3}),  # fewer samples than chunks
        (1, 8, {"always": 0, "except_last": 1, "never": 1}),  # the only micro-batch is the last
    ],
)
def test_how_many_graphs_each_checkpoint_mode_keeps(ranks, chunks, num_rows, expected):
    for found in ranks(3).run(num_graphs_between, chunks, num_rows, world=False).values():
        assert found == expected
