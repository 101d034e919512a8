"""The tasks of one partition, in one process: the graph is cut at its edges and nowhere else."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe.compute.recompute import is_recomputing
from procpipe.data.microbatch import NoChunk
from procpipe.errors import BoundaryError, RecomputeError
from procpipe.job.board import Board
from procpipe.tree import is_plain
from tests.cases import for_each
from tests.compute.segments import BOTH, Do, backward, forward, received, segment_of


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


class AnotherWay(nn.Module):
    """Returns something else when it is recomputed, if that is given."""

    again: Any = None

    def forward(self, t: Tensor) -> Tensor:
        other: Tensor = self.again(t) if self.again and is_recomputing() else t
        return other


@for_each(
    ("again", "form"),
    [(lambda t: t[:1], r"\(1, 3\), True"), (lambda t: t.detach(), r"\(4, 3\), False")],
)
def test_another_form_is_an_error_also_where_outputs_are_not_compared(again, form):
    layer = AnotherWay()
    segment = segment_of(layer)
    for _ in range(2):
        segment.begin()
        run(segment, received(torch.ones(4, 3)), recompute=True)
    layer.again = again
    segment.begin()
    forward(segment, 0, received(torch.ones(4, 3)), keep=True, recompute=True)
    with pytest.raises(RecomputeError, match=rf"{form}.*first forward gave \[\(\(4, 3\), True"):
        segment.recompute(0)


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


def test_a_recomputation_that_fails_leaves_all_as_it_was():
    def fail_again(x):
        x = x * layer.count.add_(1) * torch.rand(2)
        if is_recomputing():
            raise ZeroDivisionError
        return x

    layer: Any = Do(fail_again)
    count = torch.zeros(())
    layer.register_buffer("count", count)
    segment = segment_of(layer)
    forward(segment, 0, received(torch.ones(2)), keep=True, recompute=True)
    drawn = torch.get_rng_state()

    with pytest.raises(ZeroDivisionError):
        segment.recompute(0)

    assert (layer.count is count, count.item(), is_recomputing()) == (True, 1, False)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_long_name_of_a_layer_is_cut_on_the_board_only():
    name, board = "x" * 200, Board.create(0, 1)
    segment = segment_of({name: Do(lambda t: t @ t)}, board=board)
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
    "the mode of a module (train(), eval())": lambda layers: layers["c"].eval(),
}


@for_each(("what", "is_between"), [*product(CHANGES, [True]), *product([*CHANGES][:3], [False])])
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
            with pytest.raises(
                RecomputeError, match=f"^{re.escape(what.strip())} was changed {when}"
            ):
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
    layers, inputs = (nn.Linear(3, 3), Do(lambda x: x.as_subclass(Marked))), torch.randn(2, 3)
    options: Any = {"keep": False, "recompute": False}
    with torch.no_grad():
        output = forward(segment_of(*layers), 0, received(inputs), **options)
    assert not is_plain(output.tensors[0])  # as in the plain model: the partition is the last
    with pytest.raises(BoundaryError, match=r"^layer '1' \(Do\) returned.*\.Marked of"):
        forward(segment_of(*layers, is_last=False), 0, received(inputs), **options)


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
