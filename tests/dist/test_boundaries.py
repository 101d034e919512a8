"""Values between stages that change from one micro-batch to the next; and what is not sent.

Each case is a model of three layers, run as three stages of one layer in every checkpoint mode and
compared with the plain model bit for bit. Values of other kinds, sizes and layouts: tests/fuzz, and
tests/channel for every transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Remote, Stage, StageStatistics
from procpipe.job.world import World
from procpipe.tree import flatten
from tests.cases import pairs
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    plain_backward,
    plain_step,
    stage_of,
)

pytestmark = pytest.mark.on_gpus


class Do(nn.Module):
    """A layer from a function, with its own linear map if ``num_features`` is given."""

    def __init__(self, function: Callable[..., Any], num_features: int = 0):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(num_features, num_features) if num_features else None

    def forward(self, *inputs):
        return (
            self.function(*inputs) if self.linear is None else self.function(self.linear, *inputs)
        )


class Case(NamedTuple):
    """A model of three layers and a mini-batch for it."""

    layers: tuple[nn.Module, ...]
    inputs: tuple[Any, ...]


def rows(num_rows=7, num_columns=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)


def big(tensor, num_bytes):
    """Repeat rows until each takes this many bytes."""
    return tensor.repeat(1, num_bytes // (tensor.shape[1] * tensor.element_size()))


def frozen(layer):
    return layer.requires_grad_(False)


def linear(num_out=4):
    return nn.Linear(4, num_out)


def dtype_of(x):
    return torch.float64 if len(x) > 1 else torch.float32


def cases() -> dict[str, Case]:
    x = rows()
    return {
        "an unused input": Case(
            (linear(), Do(lambda f, x: f(torch.ones(len(x), 4, device=x.device)), 4), linear()),
            (x,),
        ),
        "detached": Case((linear(), Do(lambda f, x: f(x).detach(), 4), linear()), (x,)),
        "complex, conjugate and negative views": Case(
            (
                Do(lambda f, x: torch.complex(f(x), x).conj(), 4),
                Do(lambda f, z: (z.imag, z.conj(), f(z.real).to(torch.complex128)), 4),
                Do(lambda f, t: f(t[0]) + (t[1] * t[2]).abs(), 4),
            ),
            (x,),
        ),
        "shapes and dtypes by micro-batch": Case(
            (
                Do(lambda f, x: f(x).repeat(1, len(x)).to(dtype_of(x)), 4),
                Do(lambda f, x: (f(x[:, :4].double()), x), 4),
                Do(lambda f, t: f(t[0]) + t[1].double().sum(), 4),
            ),
            (x,),
        ),
        "a number of tensors that depends on the data": Case(
            (
                Do(lambda f, x: [f(x)[:, k % 4, None] for k in range(len(x))], 4),
                Do(lambda f, t: [f(column.expand(-1, 4)) for column in t], 4),
                Do(lambda f, t: f(torch.stack(t).sum(0)), 4),
            ),
            (x,),
        ),
        "now large, now small": Case(
            (
                Do(lambda f, x: big(f(x), 1 << (18 if x[0, 0] > 0 else 6)), 4),
                Do(
                    lambda f, x: (f(x[:, :4]), big(x[:, :4], 1 << (6 if x.shape[1] > 64 else 18))),
                    4,
                ),
                Do(lambda f, t: f(t[0]) + t[1].mean(), 4),
            ),
            (x,),
        ),
    }


def loss_of(output: Any) -> Tensor:
    """Use every floating tensor of an output, differently."""
    tensors = [tensor for tensor in flatten(output)[0] if tensor.is_floating_point()]
    return torch.stack([(k + 1) * t.square().sum() for k, t in enumerate(tensors)]).sum()


def check_cases(bare):
    torch.set_default_dtype(torch.float64)
    for (name, case), mode, chunks in pairs(cases().items(), MODES, [1, 3]):
        check_case(bare, f"{name}, {mode}, {chunks} chunks", case, mode, chunks)


def check_case(bare, name, case, mode, chunks):
    inputs = case.inputs
    model = nn.Sequential(*case.layers)
    options: Any = {"chunks": chunks, "checkpoint": mode, "loss_fn": loss_of}
    with stage_of(bare, name, model, [1, 1, 1], **options) as stage:
        # The stage has a copy, so the layers themselves are the plain model.
        for _ in range(2):
            expected = plain_step(model, inputs, None, chunks, loss_of)
            assert_same(stage.step(*inputs, target=None), expected, "loss")
            assert_same_gradients(stage, model, "step:")
        model.zero_grad()
        stage.zero_grad()

        expected_output, expected = plain_backward(model, inputs, chunks, loss_of)
        output = stage(*inputs)
        loss = output.sum() if isinstance(output, Remote) else loss_of(output)
        loss.backward()
        assert_same(stage.fetch(loss), expected, "loss")
        assert_same(stage.fetch(output), expected_output, "output")
        assert_same_gradients(stage, model, "backward:")
        model.zero_grad()


def traffic(bare, mode, style) -> list[StageStatistics]:
    """Return this stage's statistics for several models, after one mini-batch each."""
    options: Any = {"chunks": 2, "checkpoint": mode, "loss_fn": torch.mean}
    statistics: list[StageStatistics] = []
    for layers in (
        (linear(3), linear(5), linear(1)),
        (frozen(linear(3)), nn.Linear(3, 5), nn.Linear(5, 1)),
        (frozen(linear(3)), frozen(nn.Linear(3, 5)), nn.Linear(5, 1)),
        (Do(lambda ids: ids > 2), Do(lambda f, m: (f(m.float()), m), 4), Do(lambda t: t[0])),
        (nn.ReLU(), nn.ReLU(), linear(1)),
    ):
        model = nn.Sequential(*layers)
        if layers[1].__class__ is nn.Linear and layers[1].in_features == 4:
            model[1], model[2] = nn.Linear(3, 5), nn.Linear(5, 1)
        name = f"{len(statistics)}"
        with stage_of(bare, name, model, [1, 1, 1], **options) as stage:
            if style == "step":
                stage.step(rows(8).float(), target=None)
            else:
                stage(rows(8).float()).sum().backward()
            statistics.append(stage.statistics())
    return statistics


#: For each model of ``traffic``, the bytes that each stage sends forward and backward: 2
#: micro-batches of 4 samples; 32 bytes a float32 column, 8 a bool one. No unneeded gradients.
EXPECTED_TRAFFIC = [
    ({"activation": 96}, {"activation": 160, "gradient": 96}, {"gradient": 160}),
    ({"activation": 96}, {"activation": 160, "gradient": 0}, {"gradient": 160}),
    ({"activation": 96}, {"activation": 160, "gradient": 0}, {"gradient": 0}),
    ({"activation": 32}, {"activation": 160, "gradient": 0}, {"gradient": 128}),
    ({"activation": 128}, {"activation": 128, "gradient": 0}, {"gradient": 0}),
]


def test_values_that_change_by_micro_batch(ranks):
    ranks(3).run(check_cases, world=False).values()


@pytest.mark.parametrize(("style", "mode"), [("step", "always"), ("backward", "never")])
def test_no_gradient_is_sent_for_tensors_that_need_none(ranks, style, mode):
    by_rank = ranks(3).run(traffic, mode, style, world=False).values()

    for model, expected in enumerate(EXPECTED_TRAFFIC):
        for rank, sent in enumerate(expected):
            statistics = by_rank[rank][model]
            found = {kind: statistics.sent_bytes[kind] for kind in sent}
            num_messages = {kind: 2 if bytes else 0 for kind, bytes in sent.items()}
            assert found == sent, f"model {model}, stage {rank}"
            assert statistics.num_messages | num_messages == statistics.num_messages


class FirstColumn(nn.Module):
    """Returns the first column of a large input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].clone() * self.weight


def refill_one_input(world: World) -> list[float]:
    stage = Stage(nn.Sequential(nn.Flatten(), FirstColumn()), [1, 1], chunks=2, world=world)
    static, outputs = torch.zeros(4, 1 << 18), []
    with torch.no_grad():
        for k in range(5):
            static.fill_(k)
            outputs.append(stage(static))
    return [float(stage.fetch(output)[0, 0]) for output in outputs]


def test_an_input_may_be_refilled_after_the_call(ranks: Any) -> None:
    assert ranks(2).run(refill_one_input).values() == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


class PastAutograd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.add_(1)
        return x * 2


def change_past_autograd(world: World) -> None:
    layers = [nn.Linear(4, 4), PastAutograd(), nn.Linear(4, 4)]
    stage = Stage(
        nn.Sequential(*layers), [1, 2], chunks=2, checkpoint="always", loss_fn=F.mse_loss,
        world=world,
    )  # fmt: skip
    stage.step(torch.randn(4, 4), torch.randn(4, 4))


def test_a_change_past_autograd_is_reported(ranks: Any) -> None:
    victim, origin = ranks(2).run(change_past_autograd).errors()
    assert origin.type == "RecomputeError"
    assert "the layers gave values that differ" in origin.text
    assert victim.type == "RemoteStageError"
