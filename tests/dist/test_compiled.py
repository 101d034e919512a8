"""Compiled layers, and layers that recompute for themselves, train as in the plain model.

Truth is the plain model in float64, uncompiled.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from procpipe import Stage, is_recomputing
from tests.balance.test_by_shapes import Pop, Stash
from tests.dist.stages import assert_same, plain_step, world_of

TOLERANCE = 1e-12
WIDTH = 16

#: Schedule, what is recomputed, and the balance of four layers on two processes.
ALL = (
    ("gpipe", "always", [2, 2]),
    ("gpipe", "never", [2, 2]),
    ("zb-h1", "always", [1, 3]),
    ("zb-v", "never", [1, 1, 1, 1]),
)


class Block(nn.Module):
    """A residual block with buffers that change, and code that recomputation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_first_calls = torch.zeros(())  # a number would be compiled anew at each call

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.num_first_calls.add_(1)
        return x + torch.tanh(self.linear(self.norm(x)))


class Checkpointed(nn.Module):
    """Recomputes a part by itself, in a backward pass within that of the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.part, x, use_reentrant=True)
        return x + again


def make_layers(kind: str) -> list[nn.Module]:
    if kind == "skips":
        return [Stash(WIDTH, WIDTH), Block(), Block(), Pop(WIDTH, WIDTH)]
    if kind == "reentrant":
        parts = [Checkpointed() for _ in range(3)]
        return [nn.Linear(WIDTH, WIDTH), *parts]
    return [Block() for _ in range(4)]


def make_batch(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    input, target = torch.randn(2, num_samples, WIDTH, generator=generator, dtype=torch.float64)
    return input, target


#: What torch's compiler says of this release of Python.
SLOWER_GUARDS = r"Guards may run slower on Python 3\.13\.0"


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.reshape(target.shape), target)


def train(bare: Any, kind: str, how: str, backend: str, cases: Any) -> None:
    """Compare two steps with the plain model's, in every case."""
    # The first forward of a task that is recomputed keeps no graph.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    # torch's compiler causes it, and hides it where it is no error.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    warnings.filterwarnings("ignore", SLOWER_GUARDS)
    torch.manual_seed(0)
    plain = nn.Sequential(*make_layers(kind)).double()
    start = copy.deepcopy(plain)
    batches = [make_batch(9), make_batch(8)]  # the last micro-batch is smaller
    losses = [plain_step(plain, (x,), y, 3, loss_of) for x, y in batches]
    expected = dict(plain.named_parameters()), plain.state_dict()
    for schedule, mode, balance in cases:
        what = f"{kind}, {how} {backend}, {schedule}, {mode}"
        torch._dynamo.reset()  # it compiles code at most 8 times
        model: Any = copy.deepcopy(start)
        for k in (0, 1, 3) if how == "in the model" else ():
            model[k] = torch.compile(model[k], backend=backend)
        options: Any = {"chunks": 3, "checkpoint": mode, "schedule": schedule, "loss_fn": loss_of}
        stage = Stage(model, balance, world=world_of(bare, what), **options)
        keys = list(stage.state_dict())
        if how == "by the stage":
            stage.compile(backend=backend)
        assert list(stage.state_dict()) == keys, what
        assert any("_orig_mod." in key for key in keys) == (how == "in the model"), what
        for (x, y), loss in zip(batches, losses, strict=True):
            assert_same(stage.step(x, y), loss, what, TOLERANCE)
        for name, parameter in stage.named_parameters():
            gradient = expected[0][name.replace("_orig_mod.", "")].grad
            assert_same(parameter.grad, gradient, f"{what} {name}", TOLERANCE)
        for key, value in stage.state_dict().items():
            assert_same(value, expected[1][key.replace("_orig_mod.", "")], what, TOLERANCE)
        for layer in stage.modules():
            if isinstance(layer, Block):
                assert layer.num_first_calls.item() == 6, what
        stage.close()


@pytest.mark.parametrize(
    ("kind", "how", "backend", "cases"),
    [
        ("blocks", "in the model", "eager", ALL[2:3]),
        ("skips", "by the stage", "eager", ALL[:1]),
        ("reentrant", "uncompiled", "", ALL),
    ],
)
def test_training_is_the_plain_models(
    ranks: Any, kind: str, how: str, backend: str, cases: Any
) -> None:
    outcomes = ranks(2).run(train, kind, how, backend, cases, world=False)

    outcomes.values()
    for outcome, left_out in zip(outcomes, ("'0' (Stash)", "'3' (Pop)"), strict=True):
        note = f"leaves layers uncompiled that stash or pop skip tensors: {left_out}"
        assert outcome.output.count(note) == (kind == "skips"), outcome.output
