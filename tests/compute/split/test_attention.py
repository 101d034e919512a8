"""Attention with its backward in two tasks, I and W, equals the plain layer bit by bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import MultiheadAttention as Attention
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from procpipe.compute.split.attention import is_known
from procpipe.torch_internals import compile_in_place
from tests.cases import for_each, pairs
from tests.compute.split.test_splitter import (
    BOTH,
    DTYPES,
    FLOATS,
    Do,
    Own,
    check,
    equal,
    in_plain_training,
    in_tasks,
    partition_of,
    ramp,
    run_split,
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def to_itself(attention, x):
    return attention(x, x, x, need_weights=False)[0]


def to_memory(attention, x):
    memory = x.flip(0) * 0.5
    return attention(x, memory, memory, need_weights=False)[0] + x


# -- ways to call it -----------------------------------------------------------------------------

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])


def plainly(attention, q, k, v):
    return attention(q, k, v)[0]


def without_weights(attention, q, k, v):
    return attention(q, k, v, need_weights=False)[0]


def with_each_heads_weights(attention, q, k, v):
    output, weights = attention(q, k, v, average_attn_weights=False)
    return torch.cat([output.flatten(), weights.flatten()])


def with_mean_weights(attention, q, k, v):
    output, weights = attention(query=q, key=k, value=v)
    return torch.cat([output.flatten(), weights.flatten()])


def causally(attention, q, k, v):
    mask = CAUSAL.to(q.dtype)
    return attention(q, k, v, attn_mask=mask, need_weights=False, is_causal=True)[0]


def masked(attention, q, k, v):
    return attention(q, k, v, PADDING, True, CAUSAL.isinf())[0]


CALLS = [plainly, without_weights, with_each_heads_weights, with_mean_weights, causally, masked]


@for_each(("call", "batch_first", "dtype"), pairs(CALLS, [True, False], DTYPES))
def test_every_way_to_call_attention(call, batch_first, dtype):
    x = ramp(*(3, 5, 8) if batch_first else (5, 3, 8), dtype=dtype)
    attention = Attention(8, 2, batch_first=batch_first, dtype=dtype)
    check(Do(lambda attention, x: call(attention, x, x, x), attention), x, put_off=4)


SOURCES = {
    "itself": lambda x: (x, x, x),
    "memory": lambda x: (x, *[x.flip(0)] * 2),
    "three": lambda x: (x, x.flip(0), x.sin()),
    "other values": lambda x: (x, x, x.sin()),
    "other keys": lambda x: (x, x.sin(), x),
}


SHAPES = (3, 5, 8), (5, 8)


@for_each(("shape", "source", "bias", "dtype"), pairs(SHAPES, SOURCES, [True, False], DTYPES))
def test_attention_to_any_queries_keys_and_values(shape, source, bias, dtype):
    def forward(attention, x):
        return without_weights(attention, *SOURCES[source](x)) + x

    attention = Attention(8, 2, bias=bias, batch_first=True, dtype=dtype)
    check(Do(forward, attention), ramp(*shape, dtype=dtype), put_off=4 if bias else 2)


@FLOATS
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_keys_and_values_of_other_widths(bias, dtype):
    def forward(attention, x):
        return without_weights(attention, x, x[..., :6], x[..., 1:5]) + x

    attention = Attention(8, 2, bias=bias, kdim=6, vdim=4, dtype=dtype)
    check(Do(forward, attention), ramp(5, 3, 8, dtype=dtype), put_off=6 if bias else 4)


@FLOATS
@pytest.mark.parametrize("call", CALLS[:3])
def test_additional_keys_and_values(call, dtype):
    attention = Attention(8, 2, add_bias_kv=True, add_zero_attn=True, dtype=dtype)
    model = Do(lambda attention, x: call(attention, x, x, x), attention)
    check(model, ramp(5, 3, 8, dtype=dtype), put_off=4)


# -- models --------------------------------------------------------------------------------------


BOOLS = [False, True]


@for_each(("norm_first", "recompute", "dtype"), pairs(BOOLS, BOOLS, DTYPES))
def test_transformer_layers(norm_first, recompute, dtype):
    kwargs: Any = {
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": norm_first,
        "dtype": dtype,
    }
    x = ramp(3, 5, 8, dtype=dtype)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, **kwargs)
    check(encoder, x, put_off=8, recompute=recompute)
    decoder = nn.TransformerDecoderLayer(8, 2, 16, **kwargs)
    model = Do(lambda layer, x: layer(x, x.sin(), CAUSAL.to(dtype), tgt_is_causal=True), decoder)
    check(model, x, put_off=12, recompute=recompute)


def test_a_transformer():
    transformer = nn.Transformer(8, 2, 1, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    model = Do(lambda transformer, x: transformer(x, x.sin()), transformer)
    check(model, ramp(3, 5, 8, dtype=torch.float64), put_off=8 + 2 * 12)


@BOTH
@pytest.mark.parametrize("forward", [to_itself, to_memory, lambda a, x: a(x, x, x)[0]])
def test_dropout(forward, recompute):
    model = nn.Sequential(Do(forward, Attention(8, 2, dropout=0.5)))
    gradients = []
    for run in (in_plain_training, in_tasks):
        torch.manual_seed(3)
        copied = copy.deepcopy(model)
        kwargs = {} if run is in_plain_training else {"recompute": recompute, "num_split": 2}
        xs = [ramp(5, 3, 8).requires_grad_(), ramp(5, 3, 8).requires_grad_()]
        gradients.append(run(copied, xs, nullcontext, **kwargs))
        gradients[-1] += [p.grad for p in copied.parameters()]
    assert all(map(equal, *gradients))


@BOTH
@pytest.mark.parametrize("forward", [to_itself, to_memory])
def test_autocast(forward, recompute):
    model = Do(forward, Attention(8, 2))
    x = ramp(5, 3, 8)
    check(model, x, put_off=4, recompute=recompute, autocast=lambda: torch.autocast("cpu"))


@pytest.mark.parametrize("forward", [to_itself, to_memory])
@pytest.mark.parametrize(
    ("frozen", "put_off"),
    [
        (["in_proj_weight"], 2),
        (["in_proj_bias"], 3),
        (["in_proj_weight", "in_proj_bias"], 2),
        (["out_proj.weight"], 2),
        (["out_proj.bias"], 3),
    ],
)
def test_frozen_parameters(frozen, put_off, forward):
    attention = Attention(8, 2)
    for name in frozen:
        attention.get_parameter(name).requires_grad_(False)
    check(Do(forward, attention), ramp(5, 3, 8), put_off=put_off)


def test_the_fast_path_of_a_frozen_attention():
    attention = Attention(8, 2, batch_first=True).eval().requires_grad_(False)
    model = nn.Sequential(Do(to_itself, attention), nn.Linear(8, 8))
    check(model, ramp(3, 5, 8), put_off=2, requires_grad=False)


def test_a_default_device_changes_nothing():
    with torch.device("cpu"):
        check(Do(to_itself, Attention(8, 2)), ramp(5, 3, 8), put_off=4)


# -- parameters used more than once --------------------------------------------------------------


def parts_of_gradients(forward, *modules: nn.Module) -> dict[str, int]:
    """Return in how many parts the first module's parameters get their gradients."""
    parts: dict[str, int] = {}
    for name, parameter in modules[0].named_parameters():
        if parameter.requires_grad:
            parts[name] = 0

            def count(_, name=name):
                parts[name] += 1

            parameter.register_post_accumulate_grad_hook(count)
    list(run_split(partition_of(nn.Sequential(Do(forward, *modules))), ramp(5, 3, 8)))
    return parts


def test_hooks_run_once():
    def forward(attention, x):
        return to_memory(attention, to_itself(attention, x)) + attention.out_proj(x)

    assert set(parts_of_gradients(forward, Attention(8, 2)).values()) == {1}
    check(Do(forward, Attention(8, 2)), ramp(5, 3, 8), put_off=4)


def test_a_bias_of_frozen_and_trained_weights():
    attention = Attention(8, 2, kdim=4, vdim=4)
    assert attention.q_proj_weight is not None
    attention.q_proj_weight.requires_grad_(False)

    def forward(attention, x):
        return plainly(attention, x, x[..., :4], x[..., 4:])

    assert set(parts_of_gradients(forward, copy.deepcopy(attention)).values()) == {1}
    check(Do(forward, attention), ramp(5, 3, 8), put_off=0)


def test_inputs_of_a_subclass_of_tensor():
    class Marked(torch.Tensor):
        pass

    def forward(attention, x):
        return without_weights(attention, x.as_subclass(Marked), x, x).as_subclass(torch.Tensor)

    assert set(parts_of_gradients(forward, Attention(8, 2)).values()) == {1}
    check(Do(forward, Attention(8, 2)), ramp(5, 3, 8), put_off=0)


def test_a_weight_that_another_layer_computes():
    def forward(maker, attention, x):
        weight = maker(x.mean((0, 1))).reshape(24, 8)
        return torch.func.functional_call(attention, {"in_proj_weight": weight}, (x, x, x))[0]

    model = Do(forward, nn.Linear(8, 24 * 8), Attention(8, 2))
    check(model, ramp(5, 3, 8), put_off=4)  # the maker's, and of the output's projection


@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj.weight"])
def test_weights_shared_with_another_layer(name):
    def forward(attention, layer, x):
        return to_itself(attention, x) + layer(x)[..., :8]

    attention = Attention(8, 2)
    for kind, put_off in ((nn.Linear, 5), (Own, 0)):
        weight = attention.get_parameter(name)
        layer = kind(8, len(weight))
        layer.weight = weight
        assert set(parts_of_gradients(forward, copy.deepcopy(attention), layer).values()) <= {1}
        check(Do(forward, attention, layer), ramp(5, 3, 8), put_off=put_off)


def test_parameters_shared_with_a_layer_that_is_not_put_off_are_not_put_off():
    attention, own, linear = Attention(8, 2), Own(8, 24), nn.Linear(8, 24)
    own.weight = attention.in_proj_weight
    linear.bias = attention.in_proj_bias

    def forward(attention, own, linear, x):
        outside = (own(x) + linear(x) + attention.out_proj(x).repeat(1, 1, 3))[..., :8]
        return to_itself(attention, x) + outside

    check(Do(forward, attention, own, linear), ramp(5, 3, 8), put_off=0)


def test_computed_weights():
    attention = Attention(8, 2)
    parametrizations.spectral_norm(attention.out_proj)  # it changes at each computation
    check(Do(to_itself, attention), ramp(5, 3, 8), put_off=4)
    parametrizations.spectral_norm(attention, "in_proj_weight")
    check(Do(to_itself, attention), ramp(5, 3, 8), put_off=0)


@pytest.mark.parametrize("kind", [nn.Linear, partial(nn.Conv1d, kernel_size=2)])
def test_a_computed_weight_that_is_not_put_off_is_computed_once(kind):
    layer = parametrizations.spectral_norm(kind(8, 32)).requires_grad_(False)
    check(layer, ramp(5, 8, 8), put_off=0)


def test_task_w_handles_one_layer_after_the_other():
    class Log(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.mm:
                events.append("computed")
            return func(*args, **(kwargs or {}))

    events: list[str] = []
    model = nn.Sequential(*(Do(to_memory, Attention(8, 2)) for _ in range(2)))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.register_post_accumulate_grad_hook(lambda _: events.append("added"))
    tasks = run_split(partition_of(model), ramp(5, 3, 8))
    next(tasks)
    next(tasks)
    with Log():
        next(tasks)
    output, inputs = ["computed", "added"], ["computed", "computed", "added"]
    assert events == output + inputs + output + inputs


# -- attention that is not changed ---------------------------------------------------------------


def test_an_attention_with_its_own_forward_is_not_put_off():
    class Doubled(Attention):
        def forward(self, *args, **kwargs):
            output, weights = super().forward(*args, **kwargs)
            return output * 2, weights

    check(Do(to_itself, Doubled(8, 2)), ramp(5, 3, 8), put_off=0)


@pytest.mark.parametrize(
    "name", ["multi_head_attention_forward", "_in_projection_packed", "_in_projection"]
)
def test_with_another_implementation_in_torch_nothing_is_put_off(name, monkeypatch):
    assert is_known()
    functional: Any = F
    torchs = getattr(F, name)

    def elsewhere(*args, **kwargs):
        if not args:
            return functional.linear, functional._in_projection, functional._in_projection_packed
        return torchs(*args, **kwargs)

    def otherwise(*args, **kwargs):
        return torchs(*args, **kwargs)

    without_names = FunctionType(otherwise.__code__, vars(F), closure=otherwise.__closure__)
    for implementation in (elsewhere, without_names):
        monkeypatch.setattr(F, name, implementation)
        check(Do(to_itself, Attention(8, 2)), ramp(5, 3, 8), put_off=0)
    monkeypatch.delattr(F, name)
    assert not is_known()


def test_a_function_replaced_in_torch_is_called(monkeypatch):
    torchs = F.scaled_dot_product_attention
    partition = partition_of(nn.Sequential(Do(to_itself, Attention(8, 2))))
    list(run_split(partition, ramp(5, 3, 8)))
    calls = []

    def another(*args, **kwargs):
        calls.append(args)
        return torchs(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", another)
    list(run_split(partition, ramp(5, 3, 8), 1))
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_attention():
    num_compiled = 0

    def backend(graph, _):
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    attention = Attention(8, 2)
    plain = copy.deepcopy(attention)
    compile_in_place(attention, {"backend": backend}, 1)
    partition = partition_of(nn.Sequential(Do(to_itself, attention)))
    for i in range(2):
        tasks = run_split(partition, ramp(5, 3, 8), i)
        next(tasks)
        next(tasks)  # a compiled layer has its whole backward here
        to_itself(plain, ramp(5, 3, 8)).backward(torch.ones(5, 3, 8))
        for a, b in zip(attention.parameters(), plain.parameters(), strict=True):
            assert equal(a.grad, b.grad)
        next(tasks)
    assert num_compiled == 1
