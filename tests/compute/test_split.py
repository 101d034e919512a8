"""A backward pass in two tasks, I and W, equals that of the plain layers bit by bit."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from procpipe.compute.segment import Segment
from procpipe.compute.split import suited
from tests.cases import for_each, pairs
from tests.compute.segments import BOTH, Do, backward, forward, received, segment_of


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values whose sum depends on their order."""
    return _ramp(torch.Size(shape).numel()).reshape(shape).to(dtype, copy=True)


@functools.cache
def _ramp(length: int) -> Tensor:
    return torch.sin(torch.arange(length, dtype=torch.float64) * 1.7 + 0.3)


def in_plain_training(
    model: nn.Sequential, xs: list[Tensor], autocast: Callable[[], AbstractContextManager[Any]]
) -> list[Tensor | None]:
    gradients = []
    with autocast():
        outputs = []
        for x in xs:
            x = x.detach().requires_grad_(x.requires_grad)
            outputs.append((x, model(x)))
    for x, output in outputs:
        torch.autograd.backward(output, ramp(*output.shape, dtype=output.dtype))
        gradients.append(x.grad)
    return gradients


def in_tasks(
    model: nn.Sequential,
    xs: list[Tensor],
    autocast: Callable[[], AbstractContextManager[Any]],
    recompute: bool,
    num_split: int,
) -> list[Tensor | None]:
    """Run micro-batches: the first ``num_split`` with I and W, all others with B."""
    partition = segment_of(*model)
    gradients: list[Tensor | None] = []
    with autocast():
        partition.begin()
        outputs = []
        for i, x in enumerate(xs):
            inputs, is_split = received(x, x.requires_grad), i < num_split
            made = forward(partition, i, inputs, keep=True, recompute=recompute, split=is_split)
            outputs.append(made.tensors[0])
        for i, output in enumerate(outputs):
            if recompute:
                partition.recompute(i)
            given = backward(partition, i, [ramp(*output.shape, dtype=output.dtype)])
            gradients += given or [None]
        assert partition.num_held == num_split
        for i in range(num_split):
            partition.backward_weight(i)
    assert partition.num_held == 0
    return gradients


def num_put_off(model: nn.Sequential, x: Tensor) -> int:
    """Return how many parameters have no gradient, or only a part, between I and W."""
    model = copy.deepcopy(model)
    partition = segment_of(*model)
    inputs = received(x, x.requires_grad)
    output = forward(partition, 0, inputs, keep=True, recompute=False, split=True).tensors[0]
    backward(partition, 0, [ramp(*output.shape, dtype=output.dtype)])
    before = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]
    partition.backward_weight(0)
    after = [parameter.grad for parameter in model.parameters()]
    return sum(
        not equal(old, new) for old, new in zip(before, after, strict=True) if new is not None
    )


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def check(
    model: nn.Module,
    x: Tensor,
    *,
    put_off: int,
    requires_grad: bool = True,
    recompute: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Check that two steps of three micro-batches, one unsplit, equal plain training."""
    model = model if isinstance(model, nn.Sequential) else nn.Sequential(model)
    x = x.requires_grad_(requires_grad)
    xs = [x, x + 0.25, x - 0.125]
    plain, split = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(2):
        expected = in_plain_training(plain, xs, autocast)
        found = in_tasks(split, xs, autocast, recompute, num_split=2)
        # An unsplit micro-batch adds its weight gradients before the deferred ones.
        for a, b in zip(found, expected, strict=True):
            assert a is b if a is None or b is None else torch.equal(a, b)
    with autocast():
        assert num_put_off(model, x) == put_off

    split = copy.deepcopy(model)
    for _ in range(2):
        in_tasks(split, xs, autocast, recompute, num_split=3)
    for (name, p), q in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert equal(p.grad, q.grad), name


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


# -- linear layers -------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64]


SHAPES = [(7,), (33, 7), (0, 7), (1, 7), (5, 9, 7), (2, 3, 5, 7)]


@for_each(("shape", "bias", "dtype"), pairs(SHAPES, [True, False], DTYPES))
def test_linear_layers(shape, bias, dtype):
    layer = nn.Linear(7, 12, bias=bias, dtype=dtype)
    check(layer, ramp(*shape, dtype=dtype), put_off=1 + bias)


FROZEN = [(), ("weight",), ("bias",), ("weight", "bias")]


@for_each(("frozen", "requires_grad", "dtype"), pairs(FROZEN, [True, False], DTYPES))
def test_frozen_parameters_and_inputs(frozen, requires_grad, dtype):
    layer = nn.Linear(7, 12, dtype=dtype)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(12, 3, dtype=dtype))
    expected = 2 + (0 if "weight" in frozen else 2 - len(frozen))
    check(model, ramp(9, 7, dtype=dtype), put_off=expected, requires_grad=requires_grad)


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "other dimensions first": lambda t: t.reshape(3, 11, 7).transpose(0, 1),
    "transposed each": lambda t: t.reshape(3, 7, 11).transpose(1, 2),
    "every second": lambda t: t[::2],
    "expanded": lambda t: t[:, :1].expand(33, 7),
}


@for_each(("layout", "bias", "dtype"), pairs(LAYOUTS, [True, False], DTYPES))
def test_layouts_of_the_input_of_a_linear_layer(layout, bias, dtype):
    turn = LAYOUTS[layout]

    def forward(layer, x):
        return layer(turn(x)).transpose(0, 1)  # transposes the gradient of the layer's output, too

    x = ramp(33, 7, dtype=dtype)
    layer = nn.Linear(turn(x).shape[-1], 12, bias=bias, dtype=dtype)
    check(Do(forward, layer), x, put_off=1 + bias)


@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Conv1d(3, 3, 1)])
def test_the_models_first_layer_does_nothing_in_the_first_task(layer):
    ran: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(str(function))
            return function(*args, **(kwargs or {}))

    partition = segment_of(layer)
    inputs = received(ramp(2, 3, 6), requires_grad=False)
    forward(partition, 0, inputs, keep=True, recompute=False, split=True)
    gradient = ramp(2, 3, 6)
    with Listen():
        backward(partition, 0, [gradient])
        assert set(ran) <= {"aten.detach.default"}
        ran.clear()
        partition.backward_weight(0)
    assert {"aten.mm.default", "aten.convolution_backward.default"} & set(ran)


# -- convolutions --------------------------------------------------------------------------------

CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "1d circular": (nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"), (2, 4, 9)),
    "1d same, even": (nn.Conv1d(4, 6, 4, padding="same", dilation=3), (2, 4, 19)),
    "1d unbatched": (nn.Conv1d(4, 6, 3), (4, 9)),
    "2d": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 9, 8)),
    "2d 1x1 strided": (nn.Conv2d(4, 6, 1, stride=2, bias=False), (2, 4, 9, 8)),
    "2d stride, dilation": (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (2, 1)), (2, 4, 9, 8)),
    "2d groups": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 9, 8)),
    "2d depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 9, 8)),
    "2d same": (nn.Conv2d(4, 6, (3, 5), padding="same"), (2, 4, 9, 8)),
    "2d same, even": (nn.Conv2d(4, 6, (2, 3), padding="same", bias=False), (2, 4, 9, 8)),
    "2d valid": (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 8)),
    "2d reflect": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), (2, 4, 9, 8)),
    "2d replicate": (nn.Conv2d(4, 6, 3, padding="same", padding_mode="replicate"), (2, 4, 9, 8)),
    "2d unbatched": (nn.Conv2d(4, 6, 3), (4, 9, 8)),
    "2d empty batch": (nn.Conv2d(4, 6, 3), (0, 4, 9, 8)),
    "3d": (nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1), padding=1), (2, 2, 4, 5, 6)),
    "3d unbatched": (nn.Conv3d(2, 3, 2), (2, 4, 5, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@for_each(("name", "requires_grad", "dtype"), pairs(CONVOLUTIONS, [True, False], DTYPES))
def test_convolutions(name, requires_grad, dtype):
    stock, shape = CONVOLUTIONS[name]
    layer = copy.deepcopy(stock).to(dtype)
    # Other paddings, and single samples, have no rule.
    has_rule = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    is_batch = len(shape) == layer.weight.dim()
    put_off = 1 + (layer.bias is not None) if has_rule and is_batch else 0
    check(layer, ramp(*shape, dtype=dtype), put_off=put_off, requires_grad=requires_grad)


# -- models --------------------------------------------------------------------------------------


@BOTH
def test_weight_gradients_that_are_not_put_off_are_in_the_first_task(recompute):
    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.0), Own(8, 8), nn.Conv1d(5, 5, 3, padding=1)
    )
    check(model, ramp(3, 5, 6), put_off=4, recompute=recompute)


def test_hooks_of_weights_run_in_the_order_of_the_backward_pass():
    layers = [nn.Linear(6, 6, bias=False) for _ in range(3)]
    order: list[int] = []
    for k, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, k=k: order.append(k))
    partition = segment_of(*layers)
    forward(partition, 0, received(ramp(3, 6)), keep=True, recompute=False, split=True)
    backward(partition, 0, [torch.ones(3, 6)])
    assert order == []
    partition.backward_weight(0)
    assert order == [2, 1, 0]


@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Conv1d(3, 3, 1)])
def test_a_change_in_place_of_saved_tensors_is_an_error(layer):
    def changes(layer, x):
        x = x * 1
        y = layer(x)
        x.add_(1)
        return y

    partition = segment_of(Do(changes, layer))
    forward(partition, 0, received(ramp(3, 6)), keep=True, recompute=False, split=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(partition, 0, [torch.ones(3, 6)])
    assert partition.num_held == 0


def with_a_computed_weight(maker, layer, x):
    weight = maker(x.mean(0)).reshape(6, 6)
    return torch.func.functional_call(layer, {"weight": weight}, (x,))


class Scaled(nn.Conv1d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


by_columns = nn.Linear(6, 6)
by_columns.weight = nn.Parameter(ramp(6, 6).t())


@for_each(
    ("layer", "put_off"),
    [
        (by_columns, 2),
        (Do(with_a_computed_weight, nn.Linear(6, 36), nn.Linear(6, 6)), 2),
        (Do(lambda f, x: f(x + 0j).real, nn.Linear(6, 6, dtype=torch.complex64)), 0),
        (Do(lambda f, x: torch.func.vmap(f)(x), nn.Linear(6, 6)), 0),
        (Do(lambda f, x: f(x[None])[0], Scaled(4, 4, 1)), 0),
    ],
)
def test_only_weights_of_stock_layers_are_put_off(layer, put_off):
    check(layer, ramp(4, 6), put_off=put_off)


@BOTH
def test_autocast(recompute):
    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(8, 6)
    )
    x = ramp(3, 4, 6)
    check(model, x, put_off=6, recompute=recompute, autocast=lambda: torch.autocast("cpu"))
    model, x = model.double(), x.double().detach()
    check(model, x, put_off=6, recompute=recompute, autocast=lambda: torch.autocast("cpu"))


def test_a_layer_that_turns_autocast_off():
    def forward(layer, x):
        with torch.autocast("cpu", enabled=False):
            return layer(x)

    model = Do(forward, nn.Linear(6, 6))
    check(model, ramp(4, 6), put_off=2, autocast=lambda: torch.autocast("cpu"))


# -- layers that run autograd themselves ---------------------------------------------------------


@BOTH
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_inside_a_layer(use_reentrant, recompute):
    def inside(first, second, x):
        return second(F.relu_(first(x)))

    def forward(first, second, x):
        return checkpoint(inside, first, second, x, use_reentrant=use_reentrant)

    block = Do(forward, nn.Linear(6, 8), nn.Linear(8, 6))
    model = nn.Sequential(nn.Linear(6, 6), block, nn.Linear(6, 6))
    check(model, ramp(4, 6), put_off=8, recompute=recompute)


def run_split(
    partition: Segment, x: Tensor, i: int = 0, *, recompute: bool = False
) -> Iterator[None]:
    """Run the tasks of a micro-batch, one at each yield."""
    output = forward(partition, i, received(x), keep=True, recompute=recompute, split=True)
    if recompute:
        partition.recompute(i)
    yield
    backward(partition, i, [torch.ones_like(output.tensors[0])])
    yield
    partition.backward_weight(i)
    yield


def grad_in_forward(layer, x):
    with torch.enable_grad():
        x = x * 1
        (slope,) = torch.autograd.grad(layer(x).square().sum(), x)
    return layer(x) * slope


def grad_of_grad(layer, x):
    x = x * 1
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    return layer(x) + slope


def backward_in_forward(layer, x):
    layer(x.detach()).square().sum().backward()
    return layer(x)


INSIDE = (grad_in_forward, grad_of_grad, backward_in_forward)


@for_each("function", INSIDE)
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.Conv1d(3, 3, 1)])
@BOTH
def test_a_backward_pass_inside_a_layer_is_refused(layer, how, function, recompute):
    def forward(layer, x):
        if how == "plain":
            return function(layer, x)
        with torch.enable_grad():
            return checkpoint(function, layer, x, use_reentrant=how.startswith("re"))

    if how.startswith("re"):
        function = grad_in_forward  # of the others torch refuses one, and one has no graph
    partition = segment_of(Do(forward, copy.deepcopy(layer)))
    with pytest.raises(RuntimeError, match="use a schedule that does not split backward"):
        list(run_split(partition, ramp(2, 3, 6), recompute=recompute))


# -- layers that are not changed -----------------------------------------------------------------


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def test_a_layer_whose_forward_was_replaced(linear):
    linear.forward = lambda x: F.linear(x, linear.weight) * 3
    tasks = run_split(segment_of(linear), ramp(3, 6))
    next(tasks)
    next(tasks)
    assert linear.weight.grad is not None
    assert "forward" in linear.__dict__


def test_compiled_layers_and_shared_weights_are_left_as_they_are(linear):
    """Another forward would be compiled anew; hooks of a shared weight would run twice."""
    compiled, table, head = nn.Linear(6, 6), nn.Embedding(9, 6), nn.Linear(6, 9)
    compiled.compile(backend="eager")
    head.weight = table.weight
    assert suited([linear, nn.Sequential(compiled), table, head]) == [linear]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_layer_that_a_compiled_function_calls(linear):
    num_compiled = 0

    def backend(graph, _):
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    def forward(layer, x):
        return layer(x) * 2

    expected = nn.Linear(6, 6)
    expected.load_state_dict(linear.state_dict())
    partition = segment_of(Do(torch.compile(forward, backend=backend), linear))
    for _ in range(2):
        partition.begin()
        tasks = run_split(partition, ramp(3, 6))
        next(tasks)
        next(tasks)  # it has its whole backward here
        (expected(ramp(3, 6)) * 2).backward(torch.ones(3, 6))
        assert equal(linear.weight.grad, expected.weight.grad)
        next(tasks)
    assert equal(linear.weight.grad, expected.weight.grad)
    assert num_compiled == 1


def test_layers_can_be_copied_and_pickled_after_a_split_task(linear):
    list(run_split(segment_of(linear), ramp(3, 6)))
    for copied in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        with torch.no_grad():
            copied.weight.add_(1)
        assert torch.equal(copied(ramp(3, 6)), F.linear(ramp(3, 6), copied.weight, copied.bias))
    check(linear, ramp(3, 6), put_off=2)


# -- memory --------------------------------------------------------------------------------------


def test_between_the_tasks_only_two_tensors_a_layer_are_held():
    notes: dict[str, StorageWeakRef] = {}

    def note(name: str, tensor: Tensor) -> None:
        notes[name] = StorageWeakRef(tensor.untyped_storage())

    def forward_noted(layer, x):
        x = x.sin()
        y = layer(x)
        z = y.sin()
        y.register_hook(functools.partial(note, "gradient of y"))
        for name, tensor in {"x": x, "y": y, "z": z}.items():
            note(name, tensor)
        return z.cos()

    def alive() -> set[str]:
        return {name for name, reference in notes.items() if not reference.expired()}

    partition = segment_of(Do(forward_noted, nn.Linear(6, 5)))
    forward(partition, 0, received(ramp(3, 6)), keep=True, recompute=False, split=True)
    assert alive() == {"x", "y", "z"}
    backward(partition, 0, [torch.ones(3, 5)])
    assert alive() == {"x", "gradient of y"}
    assert partition.num_held == 1
    partition.backward_weight(0)
    assert alive() == set()
    assert partition.num_held == 0
    forward(partition, 1, received(ramp(3, 6)), keep=True, recompute=False, split=True)
    partition.begin()  # drops what is unfinished
    assert alive() == set()
    assert partition.num_held == 0


class Workspace(nn.Module):
    """Writes the input of a layer into the same memory for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.buffer = torch.empty(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(x, 2, out=self.buffer)
        output: Tensor = self.linear(self.buffer) + x[:, :3]
        return output


def test_overwriting_an_input_before_task_w_is_an_error() -> None:
    """Autograd checks for changes in task I, which has ended before this change."""
    partition = segment_of(Workspace())
    partition.begin()
    for i in range(2):
        forward(partition, i, received(ramp(2, 4)), keep=True, recompute=False, split=True)
        backward(partition, i, [torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match=r"layer whose weight is \(3, 4\) was changed in place"):
        partition.backward_weight(0)
    partition.backward_weight(1)
