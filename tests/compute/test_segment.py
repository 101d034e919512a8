"""The tasks of one partition, in one process: the graph is cut at its edges and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe.compute.layers import Layers
from procpipe.compute.recompute import is_recomputing
from procpipe.compute.segment import Segment
from procpipe.data.microbatch import NoChunk
from procpipe.errors import BoundaryError, RecomputeError
from procpipe.job.board import Board
from procpipe.tree import Flat, is_plain
from tests.cases import for_each

CPU = torch.device("cpu")


class Do(nn.Module):
    """A layer from a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def segment_of(*layers: Any, is_first: bool = False) -> Segment:
    is_named = len(layers) == 1 and isinstance(layers[0], dict)
    named = layers[0] if is_named else {str(k): layer for k, layer in enumerate(layers)}
    return Segment(Layers(named, CPU, is_first=is_first))


def received(value: Any, requires_grad: bool = True) -> Flat:
    """Return a value as received from the stage before."""
    tensors, structure, _ = Flat.of(value)
    flags = tuple(requires_grad and tensor.is_floating_point() for tensor in tensors)
    return Flat([tensor.clone() for tensor in tensors], structure, flags)


def forward(segment, i, inputs, **options):
    """Run a forward task of one input and one output."""
    (output,) = segment.forward(i, [inputs], **options)
    return output


def backward(segment, i, gradients):
    """Return the gradients of the only input."""
    (of_input,) = segment.backward(i, gradients)
    return of_input


def run(segment, inputs, gradient=1.0, recompute=False, i=0):
    """Run all tasks of one micro-batch; return its output and its inputs' gradients."""
    output = forward(segment, i, inputs, keep=True, recompute=recompute)
    if recompute:
        segment.recompute(i)
    given = [
        torch.full_like(tensor, gradient)
        for tensor, requires_grad in zip(output.tensors, output.requires_grad, strict=True)
        if requires_grad
    ]
    return output, backward(segment, i, given)


BOTH = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


def test_without_backward_nothing_is_kept():
    segment = segment_of(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    output = forward(segment, 0, received(torch.randn(5, 3)), keep=False, recompute=False)
    assert output.requires_grad == (False,)
    assert output.tensors[0].grad_fn is None
    assert segment.num_held == 0


@BOTH
def test_outputs_require_gradients_if_parameters_or_inputs_do(recompute):
    def case(layer, value, with_gradients=True):
        output, gradients = run(
            segment_of(layer), received(value, with_gradients), recompute=recompute
        )
        return output.requires_grad, [gradient is not None for gradient in gradients]

    x, ids = torch.randn(4, 3), torch.arange(4)
    linear, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    assert case(linear, x) == ((True,), [True])
    assert case(linear, x, with_gradients=False) == ((True,), [])
    assert case(frozen, x) == ((True,), [True])
    assert case(frozen, x, with_gradients=False) == ((False,), [])
    assert case(Do(lambda t: (t[0], t[1] > 2)), (x, ids)) == ((True, False), [True])
    assert case(nn.Embedding(4, 2), ids) == ((True,), [])
    assert case(Do(lambda t: t.detach()), x) == ((False,), [False])
    assert case(Do(lambda t: t[1] * 2.0), (x, x)) == ((True,), [False, True])
    assert case(Do(lambda t: torch.ones(2, requires_grad=True)), x) == ((True,), [False])


@BOTH
def test_a_layer_may_differentiate_in_its_forward(recompute):
    def slope(t: Tensor) -> Tensor:
        t = t * 1
        return torch.autograd.grad(t.pow(3).sum(), t, create_graph=True)[0]

    _, (gradient,) = run(
        segment_of(Do(slope)), received(torch.tensor([1.0, 2.0])), recompute=recompute
    )
    assert gradient is not None
    assert gradient.tolist() == [6.0, 12.0]


def test_what_is_frozen_is_not_recomputed():
    phases = []
    layer = Do(lambda t: t * 2)
    layer.register_forward_hook(lambda *_: phases.append(is_recomputing()))
    frozen = segment_of(layer)
    forward(frozen, 0, received(torch.ones(2), requires_grad=False), keep=True, recompute=True)
    frozen.recompute(0)
    assert backward(frozen, 0, []) == []
    assert phases == [False]


@BOTH
def test_a_layer_may_change_what_it_receives_in_place(recompute):
    x = torch.tensor([-1.0, 2.0])
    segment = segment_of(nn.Sequential(nn.ReLU(inplace=True)))
    inputs = received(x)
    output, (gradient,) = run(segment, inputs, recompute=recompute)
    assert output.tensors[0].tolist() == [0.0, 2.0]
    assert gradient is not None
    assert gradient.tolist() == [0.0, 1.0]
    if recompute:
        assert inputs.tensors[0].tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_change_in_place_of_the_partitions_input_is_an_error(requires_grad):
    segment = segment_of({"view": Do(lambda t: t[:]), "add": Do(lambda t: t.add_(1))})
    with pytest.raises(RecomputeError, match=r"layer 'add' \(Do\) changed its partition's input"):
        forward(segment, 0, received(torch.ones(2), requires_grad), keep=True, recompute=True)
    assert segment.layers.where() == "layer 'add' (Do)"
    segment, inputs = segment_of(Do(lambda t: t[:])), received(torch.ones(2), requires_grad)
    with pytest.raises(RecomputeError, match="loss_fn changed its partition's input in place"):
        forward(segment, 0, inputs, keep=True, recompute=True, finish=lambda t: t.mul_(2).mean())


@pytest.mark.parametrize("is_between", [True, False])
def test_a_change_between_forward_and_recomputation_is_an_error(is_between):
    """Between two programs by the user, or within one by a layer that keeps its last input."""
    segment = segment_of(nn.Linear(2, 2))
    inputs = received(torch.ones(3, 2))
    forward(segment, 4, inputs, keep=True, recompute=True)
    if is_between:
        segment.end()
    inputs.tensors[0].zero_()
    if is_between:
        segment.resume()
    with pytest.raises(RecomputeError, match="the input of micro-batch 4 was changed in place"):
        segment.recompute(4)


def test_a_recomputation_with_another_path_is_an_error():
    calls: list[int] = []

    def another_way(t: Tensor) -> Any:
        calls.append(1)
        return (t, t) if len(calls) > 1 else (t, t.detach())

    segment = segment_of(Do(another_way))
    forward(segment, 0, received(torch.ones(2)), keep=True, recompute=True)
    with pytest.raises(
        RecomputeError,
        match=r"\(\(2,\), True\)\], but its first forward gave .*\(\(2,\), False\)\]:",
    ):
        segment.recompute(0)


class AnotherShape(nn.Module):
    """Returns fewer rows when it is recomputed, if ``is_on``."""

    is_on = False

    def forward(self, t: Tensor) -> Tensor:
        return t[:1] if self.is_on and is_recomputing() else t


def test_another_shape_is_an_error_also_where_outputs_are_not_compared():
    layer = AnotherShape()
    segment = segment_of(layer)
    for _ in range(2):
        segment.begin()
        run(segment, received(torch.ones(4, 3)), recompute=True)
    layer.is_on = True
    segment.begin()
    forward(segment, 0, received(torch.ones(4, 3)), keep=True, recompute=True)
    with pytest.raises(RecomputeError, match=r"\(1, 3\), True.*first forward gave \[\(\(4, 3\), T"):
        segment.recompute(0)


def test_another_mode_before_recomputation_is_an_error():
    layers = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    segment = segment_of(*layers)
    forward(segment, 0, received(torch.ones(4, 3)), keep=True, recompute=True)
    segment.end()
    segment.resume()
    layers.eval()
    with pytest.raises(RecomputeError, match=r"^the mode of a module \(train\(\), eval"):
        segment.resume()


def test_the_mini_batches_that_are_compared():
    segment = segment_of(Do(lambda t: t * (1 + is_recomputing())))
    found = []
    for number in range(1, 40):
        segment.begin()
        run(segment, received(torch.ones(2)))  # nothing is recomputed
        segment.begin()
        for i in range(2):
            try:
                run(segment, received(torch.ones(2)), recompute=True, i=i)
            except RecomputeError:
                found.append((number, i))
    assert found == [(number, i) for number in (1, 2, 4, 8) for i in range(2)]


def test_what_comes_before_the_loss_is_compared():
    segment = segment_of(Do(lambda t: t + torch.tensor([1.0, -1.0]) * is_recomputing()))
    inputs = received(torch.ones(2))
    forward(segment, 0, inputs, keep=True, recompute=True, finish=torch.mean)
    with pytest.raises(RecomputeError, match="the layers gave values that differ"):
        segment.recompute(0)


def test_outputs_must_consist_of_plain_tensors_on_the_device():
    with pytest.raises(BoundaryError, match=r"layer '0' \(Do\) returned a tensor on meta"):
        run(segment_of(Do(lambda t: t.to("meta"))), received(torch.ones(2)))
    with pytest.raises(BoundaryError, match=r"layout torch\.sparse_coo"):
        run(segment_of(Do(lambda t: t.to_sparse())), received(torch.ones(2)))
    with pytest.raises(BoundaryError, match=r"type builtins.set at \[1\] cannot travel"):
        run(segment_of(Do(lambda t: (t, {1}))), received(torch.ones(2)))
    with pytest.raises(BoundaryError, match=r"layer '0' \(Do\) returned, .* a NoChunk"):
        run(segment_of(Do(lambda t: (t, NoChunk(t)))), received(torch.ones(2)))


class FailsAgain(nn.Module):
    """Counts its forwards and draws; fails in a recomputation."""

    count: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        x = x * self.count.add_(1) * torch.rand(2)
        if is_recomputing():
            raise ZeroDivisionError
        return x


def test_a_recomputation_that_fails_leaves_all_as_it_was():
    layer = FailsAgain()
    segment, count = segment_of(layer), layer.count
    forward(segment, 0, received(torch.ones(2)), keep=True, recompute=True)
    torch.rand(1)
    drawn = torch.get_rng_state()

    with pytest.raises(ZeroDivisionError):
        segment.recompute(0)

    assert layer.count is count
    assert count == 1
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not is_recomputing()


def test_a_long_name_of_a_layer_is_cut_on_the_board_only():
    name, board = "x" * 200, Board.create(0, 1)
    segment = segment_of({name: Do(lambda t: t @ t)})
    segment.layers.board = board
    with pytest.raises(RuntimeError) as caught:
        run(segment, received(torch.ones(2, 3)))
    assert caught.value.__notes__[0].startswith(f"procpipe: layer '{name}' (Do) was given")
    assert board.read().layer == f"layer '{name}"[:128]
    board.close()


# -- changes from outside, and outputs that cannot be sent ----------------------------------------


class Scaled(nn.Module):
    """Multiplies by a buffer that no forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return x * self.scale


CHANGES = {
    "a parameter": lambda layers: torch.optim.SGD(layers["a"].parameters(), lr=0.1).step(),
    "the buffer 'b.scale'": lambda layers: layers["b"].scale.fill_(2),
    "the buffer 'b.scale' ": lambda layers: setattr(layers["b"], "scale", torch.ones(4)),
}


@for_each("what", CHANGES)
@for_each("is_between", [True, False])
def test_a_change_between_a_forward_and_its_recomputation_is_an_error(what, is_between):
    """Between two programs by the user, or within one by a hook, as of an optimizer in backward."""
    layers = {"a": nn.Linear(3, 4), "b": Scaled(), "c": nn.BatchNorm1d(4)}
    for parameter in layers["a"].parameters():
        parameter.grad = torch.ones_like(parameter)
    segment = segment_of(layers)
    for changes in (False, False, True):
        segment.begin()
        for i in (0, 1):
            forward(segment, i, received(torch.randn(5, 3)), keep=True, recompute=True)
        if is_between:
            segment.end()
        if changes:
            CHANGES[what](layers)
            check = segment.resume if is_between else segment.end
            when = "after the first forward" if is_between else "by a hook"
            with pytest.raises(RecomputeError, match=f"^{what.strip()} was changed {when}"):
                check()
            return
        if is_between:
            segment.resume()
        for i in (1, 0):
            segment.recompute(i)
            backward(segment, i, [torch.ones(5, 4)])
        segment.end()


def test_a_layer_may_change_its_parameters_in_its_own_forward():
    segment = segment_of(nn.Embedding(9, 4, max_norm=1.0, _weight=torch.randn(9, 4)))
    for i in (0, 1):
        forward(segment, i, received(torch.tensor([i, 5])), keep=True, recompute=True)
    for i in (1, 0):
        segment.recompute(i)
        backward(segment, i, [torch.ones(2, 4)])
    segment.end()


class Marked(Tensor):
    """A class of a user's own."""


def test_a_tensor_of_another_class_is_not_sent():
    layers = {"0": nn.Linear(3, 3), "1": Do(lambda x: x.as_subclass(Marked))}
    with torch.no_grad():
        output = forward(
            Segment(Layers(layers, CPU, is_first=False)),
            0,
            received(torch.randn(2, 3)),
            keep=False,
            recompute=False,
        )
    assert not is_plain(output.tensors[0])  # as in the plain model: the partition is the last
    segment = Segment(Layers(layers, CPU, is_first=False, is_last=False))
    with pytest.raises(BoundaryError, match=r"^layer '1' \(Do\) returned.*\.Marked of"):
        forward(segment, 0, received(torch.randn(2, 3)), keep=False, recompute=False)


class CountsLater(nn.Module):
    """Adds a buffer, and then changes it in each forward."""

    count: Tensor

    def forward(self, x):
        if hasattr(self, "count"):
            self.count.add_(1)
            return x * self.count
        return x


def test_a_buffer_that_is_registered_later_is_repeated():
    layer = CountsLater()
    segment = segment_of(layer)
    run(segment, received(torch.ones(2)), recompute=True)
    layer.register_buffer("count", torch.zeros(()))
    for k in (1, 2):
        segment.begin()
        _, (gradient,) = run(segment, received(torch.ones(2)), recompute=True)
        assert gradient is not None
        assert gradient.tolist() == [float(k)] * 2
