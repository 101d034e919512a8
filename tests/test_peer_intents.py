"""What the tests of torchgpipe and of PyTorch's Pipe assure their users, in one process.

docs/peer_tests.md lists each of their tests with ours; here are those that had none elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe import BalanceError, BoundaryError, DeferredBatchNorm, NoChunk, Stage, is_recomputing
from procpipe.balance import balance_by_size, balance_by_time
from procpipe.skip import Namespace, pop, skippable, stash, verify_skippables


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stage_of():
    """Give ``stage_of(model, **options)``, the whole model in one stage; closed at the end."""
    stages = []

    def make(model, **options):
        stages.append(Stage(model, [len(model)], **options))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


# -- wrapper -------------------------------------------------------------------------------------


def test_settings_are_plain_values():
    stage = Stage(
        nn.Sequential(nn.Linear(2, 2)), iter([1]), chunks=42, checkpoint="always", devices=["cpu"]
    )
    assert (stage.balance, type(stage.balance)) == ([1], list)
    assert stage.devices == [torch.device("cpu")]
    assert type(stage.devices[0]) is torch.device
    assert (stage.chunks, stage.checkpoint) == (42, "always")
    stage.close()


def test_a_missing_balance_recommends_the_tool():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(
        BalanceError, match=r"for instance balance=\[2\], .* balance='time', sample=x"
    ):
        Stage(model, chunks=8)
    stage = Stage(model, "size", sample=torch.ones(8, 2), chunks=8)
    assert stage.balance == [2]
    stage.close()


def test_gradients_of_linear_layers_are_the_plain_models(stage_of):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 4), nn.Linear(4, 2)).double()
    stage = stage_of(copy.deepcopy(plain), chunks=2)
    input = torch.rand(2, 1, dtype=torch.float64)
    stage(input).norm().backward()
    plain(input).norm().backward()
    for ours, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=0)


@pytest.mark.parametrize("value", ["hello", ("hello", 3), None], ids=str)
def test_an_input_that_is_no_tensor_is_refused(stage_of, value):
    with pytest.raises(TypeError, match="holds no tensor that could be split"):
        stage_of(nn.Sequential(nn.Identity()))(value)


def test_plain_values_travel_beside_a_tensor_and_others_do_not(stage_of):
    stage = stage_of(nn.Sequential(nn.Identity()))
    assert stage((torch.ones(2), "hello"))[1] == "hello"
    with pytest.raises(BoundaryError, match=r"is a builtins\.object"):
        stage((torch.ones(2), object()))


def test_a_forward_that_yields_no_tensor_at_all_is_an_output_too(stage_of):
    class Words(nn.Module):
        def forward(self, x):
            return "some", len(x)

    assert stage_of(nn.Sequential(Words()), chunks=2)(torch.ones(3, 1)) == (
        ["some", "some"],
        [2, 1],
    )


# -- the order of recomputation and backward -----------------------------------------------------


class Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, name, log):
        ctx.name, ctx.log = name, log
        log.append(f"{name}: {'recompute' if is_recomputing() else 'forward'}")
        return input.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(f"{ctx.name}: backward")
        return gradient, None, None


class Logging(nn.Module):
    def __init__(self, name, log):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.name, self.log = name, log

    def forward(self, input):
        return Log.apply(input * self.weight, f"{self.name}{int(input[0, 0])}", self.log)


def test_each_micro_batch_is_recomputed_just_before_its_backward(stage_of):
    log: list[str] = []
    stage = stage_of(nn.Sequential(Logging("a", log), Logging("b", log)), chunks=2)
    stage(torch.tensor([[0.0], [1.0]])).sum().backward()
    assert log == [
        "a0: forward",
        "b0: forward",
        "a1: forward",
        "b1: forward",
        "b1: backward",  # the last is not recomputed
        "a1: backward",
        "a0: recompute",
        "b0: recompute",
        "b0: backward",
        "a0: backward",
    ]


# -- deferred batch normalisation ----------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_deferred_batch_norm_of_an_input_that_requires_a_gradient(stage_of, checkpoint):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3).double()
    stage = stage_of(
        nn.Sequential(copy.deepcopy(norm)),
        chunks=4,
        deferred_batch_norm=True,
        checkpoint=checkpoint,
    )
    assert isinstance(stage[0], DeferredBatchNorm)
    for _ in range(3):
        input = torch.rand(16, 3, 4, 4, dtype=torch.float64)
        ours, theirs = input.clone().requires_grad_(), input.clone().requires_grad_()
        output = stage(ours)
        output.square().sum().backward()
        norm(theirs)
        # The gradient is that of micro-batches that are each normalised by themselves.
        plain = nn.BatchNorm2d(3).double()
        torch.cat([plain(part) for part in theirs.chunk(4)]).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(stage[0].running_mean, norm.running_mean)
    torch.testing.assert_close(stage[0].running_var, norm.running_var)
    assert stage[0].num_batches_tracked == 3


# -- skip tensors --------------------------------------------------------------------------------


@skippable(stash=["skip"])
class Give(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def extra_repr(self):
        return "gives"

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x)
        return self.linear(x)


@skippable(pop=["skip"])
class Take(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip


def test_a_skippable_layer_is_the_layer_itself():
    layer = Give(3)
    assert type(layer) is Give
    assert repr(layer).startswith("Give(\n  gives")
    assert list(layer.state_dict()) == ["linear.weight", "linear.bias"]


def test_skips_of_a_model_that_repeats_its_blocks(stage_of):
    """A block used again needs a namespace of its own, inside a nested model too."""
    torch.manual_seed(0)

    def block(namespace):
        give: Any = Give()
        take: Any = Take()
        return [give.isolate(namespace), nn.Tanh(), take.isolate(namespace)]

    model = nn.Sequential(
        *block(Namespace()), nn.Sequential(*block(Namespace())), *block(Namespace())
    ).double()
    verify_skippables(model)
    plain = copy.deepcopy(model)
    stage = stage_of(model, chunks=3, checkpoint="always")
    x = torch.randn(5, 3, dtype=torch.float64)
    output, expected = stage(x), torch.cat([plain(part) for part in x.chunk(3)])
    assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


# -- balancing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_a_model_with_gradients_is_balanced_and_keeps_them(balance_by):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model(torch.rand(1, 3)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in before if gradient is not None]
    options = {"timeout": 0.0} if balance_by is balance_by_time else {}
    assert balance_by(2, model, torch.rand(1, 3), **options) == [1, 1]
    for parameter, gradient, value in zip(model.parameters(), before, values, strict=True):
        assert parameter.grad is gradient
        torch.testing.assert_close(parameter.grad, value, rtol=0, atol=0)


@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_a_model_that_takes_and_gives_a_pair_is_balanced(balance_by):
    class Twin(nn.Module):
        def forward(self, pair):
            a, b = pair
            return a * 2, b.detach()

    options = {"timeout": 0.0} if balance_by is balance_by_time else {}
    model = nn.Sequential(Twin(), Twin())
    pair = (torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True))
    assert sum(balance_by(1, model, pair, **options)) == 2


# -- Pipe ----------------------------------------------------------------------------------------


def test_no_chunk_holds_its_tensor():
    tensor = torch.ones(2)
    assert NoChunk(tensor).tensor is tensor
    with pytest.raises(TypeError, match="NoChunk wraps a tensor, not a str"):
        NoChunk("hello")  # type: ignore[arg-type]


def test_a_nested_sequential_is_one_layer(stage_of):
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    model = nn.Sequential(inner, nn.Linear(3, 1))
    stage = stage_of(model)
    assert len(stage) == 2
    assert stage[0] is inner
    assert list(stage.state_dict()) == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
