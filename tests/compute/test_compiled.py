"""Compiled layers train as in the plain model, and recompute, split and skip as others do."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage, is_recomputing
from tests.balance.test_by_shapes import Pop, Stash
from tests.dist.stages import assert_same, plain_step

TOLERANCE = 1e-12
WIDTH = 16

#: What torch's compiler says of its own code.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def make_batch(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    input, target = torch.randn(2, num_samples, WIDTH, generator=generator, dtype=torch.float64)
    return input, target


def test_recomputation_repeats_compiled_layers_and_compiles_nothing_anew() -> None:
    found = []
    for mode in ("never", "always"):
        graphs: list[Any] = []

        def compiler(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))).double()
        stage = Stage(model, chunks=2, checkpoint=mode, loss_fn=F.mse_loss)
        stage.compile(backend=compiler)
        torch.manual_seed(1)
        for _ in range(2):
            stage.step(*make_batch(8))
        gradients = [parameter.grad for parameter in stage.parameters()]
        stage.close()
        found.append((len(graphs), gradients))
    assert found[0][0] > 0
    assert_same(found[1], found[0], "recomputed", TOLERANCE)


class Block(nn.Module):
    """A residual block with buffers that change, and code that recomputation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_first_calls = torch.zeros(())  # a number would be compiled anew at each call

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.num_first_calls.add_(1)
        return x + torch.tanh(self.linear(self.norm(x)))


@pytest.mark.parametrize("by_the_stage", [False, True])
def test_compiled_layers_beside_skips_train_as_in_the_plain_model(
    by_the_stage: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain: Any = nn.Sequential(Stash(WIDTH, WIDTH), Block(), Pop(WIDTH, WIDTH)).double()
    model = copy.deepcopy(plain)
    if not by_the_stage:
        model[1] = torch.compile(model[1], backend="eager")
    stage: Any = Stage(model, chunks=3, checkpoint="always", loss_fn=F.mse_loss)
    if by_the_stage:
        stage.compile(backend="eager")
    for input, target in map(make_batch, (9, 8)):  # the last micro-batch is smaller
        expected = plain_step(plain, (input,), target, 3, F.mse_loss)
        assert_same(stage.step(input, target), expected, "loss", TOLERANCE)
    ours, theirs = stage.state_dict(keep_vars=True), plain.state_dict(keep_vars=True)
    for key, value in ours.items():
        truth = theirs[key.replace("_orig_mod.", "")]
        assert_same(value.detach(), truth.detach(), key, TOLERANCE)
        assert_same(value.grad, truth.grad, f"gradient of {key}", TOLERANCE)
    assert any("_orig_mod." in key for key in ours) != by_the_stage
    assert stage[1].num_first_calls.item() == 6
    note = "leaves layers uncompiled that stash or pop skip tensors: '0' (Stash), '2' (Pop)"
    assert capsys.readouterr().err.count(note) == by_the_stage


class Numbered(nn.Module):
    """A layer whose number is a constant in what torch compiles of it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH, WIDTH), number

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) / self.number


def test_more_layers_than_torch_compiles_versions(caplog: pytest.LogCaptureFixture) -> None:
    """That equal layers share a graph: tests/hf/test_sequential.py."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[Numbered(k + 1) for k in range(9)]).double()
    graphs: list[Any] = []
    calls: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        number = len(graphs)
        graphs.append(graph)

        def call(*args: Any) -> Any:
            calls.append(number)
            return graph.forward(*args)

        return call

    input, target = make_batch(4)
    found = []
    for is_compiled in (False, True):
        options: Any = {"chunks": 2, "loss_fn": F.mse_loss, "checkpoint": "never"}
        stage = Stage(copy.deepcopy(model), **options)
        if is_compiled:
            stage.compile(backend=backend)
        losses = [stage.step(input, target) for _ in range(2)]
        found.append([*losses, *(parameter.grad for parameter in stage.parameters())])
        stage.close()
    assert_same(found[1], found[0], "compiled", TOLERANCE)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(calls) == 4 * 9  # two steps of two micro-batches
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        assert len(graphs) == 9
