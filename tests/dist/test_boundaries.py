"""Values between stages: nested, of any dtype, shape, layout and size, with or without gradients.

Each case is a model of three layers, run as three stages of one layer in every checkpoint mode and
compared with the plain model bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import NoChunk, RecomputeError, Remote, RemoteStageError, Stage, StageStatistics
from procpipe.channel.link import INLINE_BYTES
from procpipe.job.world import World
from procpipe.tree import flatten
from tests.cases import pairs
from tests.dist.devices import is_on_gpus, some_of
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


class Scale(torch.autograd.Function):
    """A user's autograd function, whose backward is not its forward's derivative."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        return a * 2, b + 1

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        (a,) = ctx.saved_tensors
        return grad_a * 2 + a, grad_b


class Case(NamedTuple):
    """A model of three layers and a mini-batch for it.

    Results may differ from the plain model's in the last digits if the boundary changes the order
    of additions (gradients of a tensor that is sent twice) or the layout of a factor.
    """

    layers: tuple[nn.Module, ...]
    inputs: tuple[Any, ...]
    tolerance: float = 0.0


def rows(num_rows=7, num_columns=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)


def big(tensor, num_bytes):
    """Repeat rows until each takes this many bytes."""
    return tensor.repeat(1, num_bytes // (tensor.shape[1] * tensor.element_size()))


def frozen(layer):
    return layer.requires_grad_(False)


def channels_last(layer: Any) -> Any:
    return layer.to(memory_format=torch.channels_last)


def linear(num_out=4):
    return nn.Linear(4, num_out)


def structures() -> dict[str, Case]:
    x, mask = rows(), torch.tensor([True, False, True, True, False, True, True])
    return {
        "tuple": Case(
            (
                Do(lambda f, x: (f(x), x), 4),
                Do(lambda f, pair: (f(pair[0]), pair[0] * pair[1]), 4),
                Do(lambda f, pair: f(pair[0]) + pair[1], 4),
            ),
            (x,),
        ),
        "list in dict": Case(
            (
                Do(lambda f, x: {"h": [f(x), (x,)], "none": None}, 4),
                Do(lambda f, d: {"h": [f(d["h"][0]), *d["h"]], 3: d["none"]}, 4),
                Do(lambda f, d: f(d["h"][0]) + d["h"][1] + d["h"][2][0], 4),
            ),
            (x,),
        ),
        "plain values": Case(
            (
                Do(lambda f, x: (f(x), None, 2, 0.5, "tanh", True), 4),
                Do(lambda f, t: (getattr(torch, t[4])(f(t[0])) * t[3] ** t[2], *t[1:]), 4),
                Do(lambda f, t: f(t[0]) * (t[1] is None) * t[5], 4),
            ),
            (x,),
        ),
        "a 1-tuple stays a 1-tuple": Case(
            (Do(lambda f, x: (f(x),), 4), Do(lambda f, t: (f(*t),), 4), Do(lambda f, t: f(*t), 4)),
            (x,),
        ),
        "an empty tuple": Case(
            (Do(lambda f, x: (f(x), (), {}), 4), Do(lambda t: t), Do(lambda f, t: f(t[0]), 4)),
            (x,),
        ),
        "token ids": Case(
            (Do(lambda ids: ids + 1), nn.Embedding(12, 4), linear()),
            (torch.arange(7) % 10,),
        ),
        "bool mask": Case(
            (
                Do(lambda f, x, mask: (f(x), mask), 4),
                Do(lambda f, t: (f(t[0]).masked_fill(~t[1][:, None], 0.0), ~t[1]), 4),
                Do(lambda f, t: f(t[0]) * t[1][:, None], 4),
            ),
            (x, mask),
        ),
        "float mask": Case(
            (
                Do(lambda f, x, mask: (f(x), mask), 4),
                Do(lambda f, t: (f(t[0]) * t[1], t[1]), 4),
                Do(lambda f, t: f(t[0]) + t[1], 4),
            ),
            (x, mask[:, None].double()),
        ),
        "no chunk and plain inputs": Case(
            (
                Do(lambda f, x, table, p: (f(x) @ table * p["scale"], table), 4),
                Do(lambda f, t: (f(t[0]) @ t[1], t[1]), 4),
                Do(lambda f, t: f(t[0]) + t[1].sum(), 4),
            ),
            (x, NoChunk(rows(4)), {"scale": 0.5, "name": None}),
        ),
        "nothing splits but a nested tensor": Case(
            (Do(lambda f, d: f(d["a"][0]), 4), linear(), linear()), ({"a": [x, 3]},)
        ),
    }


def gradients() -> dict[str, Case]:
    x = rows()
    return {
        "frozen first stage": Case((frozen(linear()), linear(), linear()), (x,)),
        "frozen middle stage": Case((linear(), frozen(linear()), linear()), (x,)),
        "frozen last stage": Case((linear(), linear(), frozen(linear())), (x,)),
        "two frozen stages": Case((frozen(linear()), frozen(linear()), linear()), (x,)),
        "only the first stage learns": Case((linear(), nn.ReLU(), nn.Tanh()), (x,)),
        "only the last stage learns": Case((nn.ReLU(), nn.Tanh(), linear()), (x,)),
        "an unused output": Case(
            (
                Do(lambda f, x: (f(x), f(x).exp()), 4),
                Do(lambda f, t: (t[0].detach(), f(t[0]), t[1]), 4),
                Do(lambda f, t: f(t[1]), 4),
            ),
            (x,),
        ),
        "an unused input": Case(
            (linear(), Do(lambda f, x: f(torch.ones(len(x), 4, device=x.device)), 4), linear()),
            (x,),
        ),
        "detached": Case((linear(), Do(lambda f, x: f(x).detach(), 4), linear()), (x,)),
        "passed through": Case(
            (
                Do(lambda f, x: [x, f(x)], 4),
                Do(lambda f, t: [*t, f(t[1])], 4),
                Do(lambda f, t: f(t[2]) + t[0] + t[1], 4),
            ),
            (x,),
        ),
        "one tensor twice": Case(
            (
                Do(lambda f, x: (y := f(x), y, y), 4),
                Do(lambda f, t: (t[0], f(t[1]) + t[2], t[0]), 4),
                Do(lambda f, t: f(t[0]) * t[1] + t[2], 4),
            ),
            (x,),
            1e-13,
        ),
        "a parameter": Case(
            (
                Do(lambda f, x: (f(x), f.weight, f.bias), 4),
                Do(lambda f, t: (f(t[0]) @ t[1], t[2]), 4),
                Do(lambda f, t: f(t[0]) + t[1], 4),
            ),
            (x,),
        ),
        "a function of the user's own": Case(
            (
                Do(lambda f, x: Scale.apply(f(x), x), 4),
                Do(lambda f, t: Scale.apply(t[0], f(t[1])), 4),
                Do(lambda f, t: Scale.apply(f(t[0]), t[1])[0], 4),
            ),
            (x,),
        ),
        "in place": Case(
            (
                nn.ReLU(inplace=True),
                nn.Sequential(nn.ReLU(inplace=True), linear(), Do(lambda x: x.mul_(2))),
                nn.Sequential(nn.Hardtanh(inplace=True), linear()),
            ),
            (x,),
        ),
        "in place after a layer": Case(
            (
                nn.Sequential(linear(), nn.Hardtanh(inplace=True)),
                nn.Sequential(linear(), nn.ReLU(inplace=True)),
                nn.Sequential(linear(), nn.SiLU(inplace=True), linear()),
            ),
            (x,),
        ),
    }


def layouts() -> dict[str, Case]:
    x = rows()
    return {
        "not contiguous": Case(
            (
                Do(lambda f, x: f(x).t(), 4),
                Do(lambda f, x: f(x.t())[:, ::2].expand(3, -1, -1).permute(1, 2, 0), 4),
                Do(lambda f, x: f(F.pad(x.sum(2), (1, 1))), 4),
            ),
            (x,),
            1e-13,
        ),
        "channels last": Case(
            (
                Do(lambda x: x.to(memory_format=torch.channels_last)),
                channels_last(nn.Conv2d(4, 8, 3)),
                nn.Conv2d(8, 3, 3),
            ),
            (torch.randn(7, 4, 6, 6),),
            1e-13,
        ),
        "complex, conjugate and negative views": Case(
            (
                Do(lambda f, x: torch.complex(f(x), x).conj(), 4),
                Do(lambda f, z: (z.imag, z.conj(), f(z.real).to(torch.complex128)), 4),
                Do(lambda f, t: f(t[0]) + (t[1] * t[2]).abs(), 4),
            ),
            (x,),
        ),
        "without elements": Case(
            (
                Do(lambda f, x: (f(x), x[:, :0], f(x)[:, :0]), 4),
                Do(lambda f, t: (f(t[0]) + t[1].sum() + t[2].sum(), t[1]), 4),
                Do(lambda f, t: f(t[0]) + t[1].sum(), 4),
            ),
            (x,),
        ),
        "without dimensions": Case(
            (
                Do(lambda f, x: (f(x), f(x).mean()), 4),
                Do(
                    lambda f, t: (f(t[0]) * t[1], t[1].exp(), torch.tensor(2, device=t[1].device)),
                    4,
                ),
                Do(lambda f, t: (f(t[0]) * t[1] + t[2]).mean(), 4),
            ),
            (x,),
        ),
        "dtypes": Case(
            (
                Do(lambda f, x: (f(x).float(), f(x).bfloat16(), f(x).half(), x.to(torch.int8)), 4),
                Do(lambda t: (t[0] + t[1], t[2].double(), t[3] > 0)),
                Do(lambda f, t: f(t[1] + t[0]) * t[2], 4),
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
    }


def dtype_of(x):
    return torch.float64 if len(x) > 1 else torch.float32


def sizes() -> dict[str, Case]:
    """Messages inside their token (up to INLINE_BYTES), after it, both in turn, and in pieces."""
    x = rows(6)
    cases = {}
    for extra in (-8, 0, 8):
        # Two samples of float64 that take 16 bytes less than, exactly or 16 more than a token.
        width = INLINE_BYTES // 16 + extra // 8
        cases[f"a token and {16 * width - INLINE_BYTES} bytes"] = Case(
            (
                Do(lambda f, x, w=width: F.pad(f(x), (0, w - 4)), 4),
                Do(lambda f, x: torch.cat([f(x[:, :4]), x[:, 4:]], 1), 4),
                Do(lambda f, x: f(x[:, -4:]) + x[:, :4], 4),
            ),
            (x,),
        )
    cases["megabytes"] = Case(
        (
            Do(lambda f, x: big(f(x), 9 << 20), 4),  # two rows a message
            Do(lambda f, x: torch.sin(x) * f(x[:, :4]).mean(), 4),
            Do(lambda f, x: f(x[:, -4:]) + x.mean(), 4),
        ),
        (x,),
    )
    cases["large beside tiny, empty and of all dtypes"] = Case(
        (
            Do(
                lambda f, x: (
                    big(f(x), 1 << 17),
                    f(x)[:, :0],
                    f(x).mean(),
                    big(x, 1 << 17) > 0,
                    big(x, 1 << 17).bfloat16(),
                    torch.complex(big(f(x), 1 << 17), big(x, 1 << 17)).conj(),
                    big(x, 1 << 17).long().t(),
                ),
                4,
            ),
            Do(lambda t: (t[0] + t[5].imag * t[3] + t[4] + t[6].t(), t[1], t[2])),
            Do(lambda f, t: f(t[0][:, :4]) + t[0].mean() + t[1].sum() + t[2], 4),
        ),
        (x,),
    )
    cases["now large, now small"] = Case(
        (
            Do(lambda f, x: big(f(x), 1 << (18 if x[0, 0] > 0 else 6)), 4),
            Do(lambda f, x: (f(x[:, :4]), big(x[:, :4], 1 << (6 if x.shape[1] > 64 else 18))), 4),
            Do(lambda f, t: f(t[0]) + t[1].mean(), 4),
        ),
        (x,),
    )
    return cases


def outputs() -> dict[str, Case]:
    """Outputs of the last stage, gathered like the plain model's over the micro-batches."""
    x = rows()
    return {
        "output of all kinds": Case(
            (
                linear(),
                linear(),
                Do(
                    lambda f, x: {
                        "logits": f(x),
                        "loss": f(x).mean(),
                        "ids": f(x).argmax(1),
                        "none": None,
                        "count": len(x),
                        "list": [x, (f(x)[:, :0],)],
                    },
                    4,
                ),
            ),
            (x,),
        ),
        "output of a view": Case((linear(), linear(), Do(lambda f, x: f(x)[:, ::2], 4)), (x,)),
        "output is the input": Case((linear(), Do(lambda x: x), Do(lambda x: x)), (x,)),
    }


GROUPS = {
    "structures": structures,
    "gradients": gradients,
    "layouts": layouts,
    "outputs": outputs,
}


def loss_of(output: Any) -> Tensor:
    """Use every floating tensor of an output, differently."""
    tensors = [tensor for tensor in flatten(output)[0] if tensor.is_floating_point()]
    return torch.stack([(k + 1) * t.square().sum() for k, t in enumerate(tensors)]).sum()


def check_group(bare, group):
    torch.set_default_dtype(torch.float64)
    for (name, case), mode, chunks in pairs(GROUPS[group]().items(), MODES, [1, 3]):
        check_case(bare, f"{name}, {mode}, {chunks} chunks", case, mode, chunks)


def check_sizes(bare, transport):
    torch.set_default_dtype(torch.float64)
    cases = list(product(sizes().items(), MODES))
    if transport == "sockets":  # each size in one mode, and each mode with some sizes
        cases = [each for k, each in enumerate(cases) if k % len(MODES) == k // len(MODES) % 3]
    for (name, case), mode in some_of(cases):
        check_case(bare, f"{name}, {mode}, {transport}", case, mode, 3, transport=transport)


def check_case(bare, name, case, mode, chunks, **more):
    inputs, tolerance = case.inputs, case.tolerance
    model = nn.Sequential(*case.layers)
    options: Any = {"chunks": chunks, "checkpoint": mode, "loss_fn": loss_of, **more}
    with stage_of(bare, name, model, [1, 1, 1], **options) as stage:
        # The stage has a copy, so the layers themselves are the plain model.
        for _ in range(2):
            expected = plain_step(model, inputs, None, chunks, loss_of)
            assert_same(stage.step(*inputs, target=None), expected, "loss", tolerance)
            assert_same_gradients(stage, model, "step:", tolerance)
        model.zero_grad()
        stage.zero_grad()

        expected_output, expected = plain_backward(model, inputs, chunks, loss_of)
        output = stage(*inputs)
        loss = output.sum() if isinstance(output, Remote) else loss_of(output)
        loss.backward()
        assert_same(stage.fetch(loss), expected, "loss", tolerance)
        assert_same(stage.fetch(output), expected_output, "output", tolerance)
        assert_same_gradients(stage, model, "backward:", tolerance)
        model.zero_grad()


def check_in_place(bare):
    """Change a received tensor in place, where it is not needed again, as in the plain model."""
    torch.set_default_dtype(torch.float64)
    case = Case(
        (
            linear(),
            Do(lambda t: t.mul_(2)),
            nn.Sequential(Do(lambda t: t.add_(1).mul_(3)), linear()),
        ),
        (rows(),),
    )
    for chunks in (1, 3):
        check_case(bare, f"in place {chunks}", case, "never", chunks)
    check_case(bare, "in place, the last micro-batch", case, "except_last", 1)


def step_that_changes_its_input(bare, mode, style):
    """Run a stage whose layer 'add' changes a checkpointed input in place."""
    model = nn.Sequential()
    model.add_module("linear", linear())
    model.add_module("keep", Do(lambda t: t[:]))
    model.add_module("add", Do(lambda t: t.add_(1)))
    model.add_module("end", linear())
    options: Any = {"chunks": 2, "checkpoint": mode, "loss_fn": torch.mean}
    with stage_of(bare, f"{mode} {style}", model, [1, 2, 1], **options) as stage:
        if style == "step":
            stage.step(rows().float(), target=None)
        else:
            stage(rows().float()).sum().backward()


def change_the_input_between(bare, mode, num_rows):
    """Overwrite the mini-batch between forward and backward."""
    with stage_of(
        bare, "between", nn.Sequential(linear(), linear()), [1, 1], chunks=2, checkpoint=mode
    ) as stage:
        input = rows(num_rows).float()
        output = stage(input)
        if bare.rank == 0:
            input.zero_()
        output.sum().backward()


def gradients_of_inputs(bare, balance):
    """Inputs that require gradients get the plain model's gradients, on rank 0 only."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(
        Do(lambda f, x, d: f(x * d["scale"]) @ d["table"], 4), nn.ReLU(inplace=True), linear(2)
    )
    for mode in MODES:
        for style in ("step", "forward"):
            weight, x = rows(1).requires_grad_(), rows().requires_grad_()
            table = rows(4).requires_grad_()

            def make(x=x, weight=weight, table=table):
                return x * weight, {"scale": x.exp(), "table": NoChunk(table), "mask": x > 0}

            options: Any = {"chunks": 3, "checkpoint": mode, "loss_fn": loss_of}
            with stage_of(bare, f"{mode} {style}", model, balance, **options) as stage:
                for _ in range(2):
                    if style == "step":
                        stage.step(*make(), target=None)
                    else:
                        output = stage(*make())
                        output = output if isinstance(output, Remote) else loss_of(output)
                        output.sum().backward()
            found = [tensor.grad for tensor in (x, weight, table)]
            for tensor in (x, weight, table):
                tensor.grad = None
            for _ in range(2):
                made = make()
                pairs: list[tuple[Tensor, Tensor]] = []
                given = cut(made, pairs)
                if style == "step":
                    plain_step(model, given, None, 3, loss_of)
                else:
                    plain_backward(model, given, 3, loss_of)
                for tensor, leaf in pairs:
                    tensor.backward(leaf.grad)
            expected = [tensor.grad for tensor in (x, weight, table)]
            model.zero_grad()
            if bare.rank == 0:
                assert_same(found, expected, f"{mode} {style}", 1e-13)
            else:
                assert found == [None] * 3, f"{mode} {style}: {found}"


def cut(value, pairs):
    """Return a nested value with leaves for tensors; append each tensor and its leaf to pairs."""
    if isinstance(value, tuple):
        return tuple(cut(child, pairs) for child in value)
    if isinstance(value, dict):
        return {key: cut(child, pairs) for key, child in value.items()}
    if isinstance(value, NoChunk):
        return NoChunk(cut(value.tensor, pairs))
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    pairs.append((value, value.detach().requires_grad_()))
    return pairs[-1][1]


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


@pytest.mark.parametrize("group", GROUPS)
def test_parity(ranks, group):
    ranks(3).run(check_group, group, world=False).values()


def test_parity_of_small_and_large_messages(ranks):
    ranks(3).run(check_sizes, None, world=False).values()


class Strides(nn.Module):
    """Passes on its input; notes its strides, and those of its gradient."""

    def forward(self, x):
        self.of_input = x.stride()
        x.register_hook(lambda gradient: setattr(self, "of_gradient", gradient.stride()))
        return x * 1.0


def strides_at_a_boundary(world):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Strides(), Strides(), nn.Conv2d(4, 4, 3))
    stage = Stage(model, [2, 2], loss_fn=torch.mean, checkpoint="never", world=world)
    stage.step(torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last))
    (at_end,) = (layer for layer in stage if isinstance(layer, Strides))
    return at_end.of_input, at_end.of_gradient


@pytest.mark.only_on_cpus
def test_channels_last_survives_a_boundary_both_ways(ranks):
    expected = torch.empty(2, 4, 6, 5, memory_format=torch.channels_last).stride()

    assert ranks(2).run(strides_at_a_boundary).values() == [(expected, expected)] * 2


@pytest.mark.only_on_cpus
def test_parity_of_small_and_large_messages_over_sockets(ranks):
    ranks(3).run(check_sizes, "sockets", world=False).values()


def test_a_layer_may_change_its_input_in_place_where_nothing_is_recomputed(ranks):
    ranks(3).run(check_in_place, world=False).values()


@pytest.mark.parametrize("style", ["step", "backward"])
@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_a_layer_that_changes_its_checkpointed_input_is_named_on_every_rank(ranks, mode, style):
    errors = ranks(3).run(step_that_changes_its_input, mode, style, world=False).errors()

    assert [error.type for error in errors] == [
        RemoteStageError.__name__,
        RecomputeError.__name__,
        RemoteStageError.__name__,
    ]
    for error in errors:
        assert "layer 'add' (Do) changed its partition's input in place" in error.text
        assert "x = x + 1 for x.add_(1)" in error.text


@pytest.mark.only_on_cpus  # GPUs compute on a copy
def test_an_input_changed_between_forward_and_backward_is_reported(ranks):
    first, last = ranks(2).run(change_the_input_between, "always", 6, world=False)

    message = "the input of micro-batch 1 was changed in place after its first"
    assert first.error.type == RecomputeError.__name__
    assert message in first.error.text
    # The last stage may have ended before the first one detects the change.
    assert last.error is None or message in last.error.text
    # Without recomputation autograd detects it.
    outcomes = ranks(2).run(change_the_input_between, "never", 6, world=False)
    assert "modified by an inplace operation" in outcomes[0].error.text


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_inputs_that_require_gradients(ranks, balance):
    ranks(len(balance)).run(gradients_of_inputs, balance, world=False).values()


@pytest.mark.parametrize("style", ["step", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_is_sent_for_tensors_that_need_none(ranks, mode, style):
    by_rank = ranks(3).run(traffic, mode, style, world=False).values()

    for model, expected in enumerate(EXPECTED_TRAFFIC):
        for rank, sent in enumerate(expected):
            statistics = by_rank[rank][model]
            found = {kind: statistics.sent_bytes[kind] for kind in sent}
            num_messages = {kind: 2 if bytes else 0 for kind, bytes in sent.items()}
            assert found == sent, f"model {model}, stage {rank}"
            assert statistics.num_messages | num_messages == statistics.num_messages


class OwnBuffer(nn.Module):
    """Returns the same memory each time, with new values."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(2, 1 << 18)

    def forward(self, x: Tensor) -> Tensor:
        self.memory = self.memory.to(x.device)
        self.memory.copy_(x.expand(2, 1 << 18))
        return self.memory


class FirstColumn(nn.Module):
    """Returns the first column of a large input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].clone() * self.weight


def send_memory_that_is_overwritten(world: World) -> float:
    stage = Stage(
        nn.Sequential(OwnBuffer(), FirstColumn()), [1, 1], chunks=4, checkpoint="never",
        loss_fn=lambda output: output.mean(), world=world,
    )  # fmt: skip
    return float(stage.step(torch.arange(8.0)[:, None], target=None))


def test_memory_overwritten_while_it_is_sent_is_reported(ranks: Any) -> None:
    outcomes = ranks(2).run(send_memory_that_is_overwritten)
    if all(outcome.error is None for outcome in outcomes):  # each was sent before the next forward
        assert outcomes.values() == [3.5, 3.5]
    else:
        origin, victim = (outcome.error for outcome in outcomes)
        assert origin.type == "OverwrittenError"
        assert "activation to stage 1 (rank 1) was written to" in origin.text
        if victim is not None or not is_on_gpus():  # on GPUs it may have its loss already
            assert victim.type == "RemoteStageError"


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
    assert "past autograd" in origin.text
    assert victim.type == "RemoteStageError"
