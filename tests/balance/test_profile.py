"""A profile for planning, compared with counts by hand."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe.balance import Inputs, profile_layers
from procpipe.compute.layers import Layers
from procpipe.compute.segment import Segment
from procpipe.planner.costs import Table
from procpipe.skip import pop, skippable, stash
from procpipe.tree import TENSOR, Flat
from tests.balance.layers import float32
from tests.skip.layers import popper


def profiled(*layers: nn.Module, sample: object, **more: Any) -> Table:
    return profile_layers(nn.Sequential(*layers), sample, timeout=0, **more)


def test_linear_and_relu_counted_by_hand() -> None:
    linear, relu = profiled(nn.Linear(10, 20), nn.ReLU(), sample=torch.rand(8, 10)).layers

    assert (linear.name, relu.name) == ("0", "1")
    assert linear.output_bytes == relu.output_bytes == float32(8, 20)
    # A linear layer keeps its input for the weight's gradient, a ReLU its output.
    assert (linear.kept_input_bytes, linear.kept_output_bytes, linear.kept_bytes) == (
        float32(8, 10), 0, 0,
    )  # fmt: skip
    assert (relu.kept_input_bytes, relu.kept_output_bytes, relu.kept_bytes) == (
        0, float32(8, 20), 0,
    )  # fmt: skip
    # The weight's gradient needs the input, and the gradient of the output.
    assert linear.put_off_bytes == float32(8, 10) + float32(8, 20)
    assert relu.put_off_bytes == 0
    assert linear.seconds["I"] == linear.seconds["W"]
    assert relu.seconds["I"] == relu.seconds["B"]
    assert linear.parameter_bytes == linear.trained_bytes == float32(11, 20)
    assert relu.parameter_bytes == 0
    assert not linear.is_in_place
    assert not relu.is_in_place


def test_the_bytes_that_a_transformer_puts_off_are_those_of_a_partition() -> None:
    block = nn.TransformerEncoderLayer(128, 2, 512, dropout=0.0, batch_first=True)
    x = torch.rand(8, 32, 128)

    (layer,) = profiled(block, sample=x).layers

    partition = Segment(Layers({"0": block}, torch.device("cpu"), is_first=False))
    partition.begin()
    (output,) = partition.forward(
        0, [Flat([x], TENSOR, (True,))], keep=True, recompute=False, split=True
    )
    partition.backward(0, [torch.ones_like(output.tensors[0])])
    assert layer.put_off_bytes == put_off_bytes(partition, 0)


def put_off_bytes(partition: Segment, i: int) -> int:
    """Return the bytes that a partition holds from task I of a micro-batch to its task W."""
    waiting = partition._put_off[i].waiting
    calls = [call for of_layer in waiting.values() for call in of_layer]
    kept = [tensor for call in calls for tensor in (call.x, call.gradient)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def test_layers_that_work_in_place_or_return_a_view() -> None:
    sample = torch.rand(8, 4, 5)
    layers = profiled(nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Flatten(), sample=sample).layers

    assert [layer.is_in_place for layer in layers] == [False, True, True]
    assert layers[1].kept_output_bytes == float32(8, 4, 5)


def test_frozen_parameters_get_no_gradient() -> None:
    linear = nn.Linear(10, 20)
    linear.weight.requires_grad_(False)

    (layer,) = profiled(linear, sample=torch.rand(8, 10)).layers

    assert layer.parameter_bytes == float32(11, 20)
    assert layer.trained_bytes == float32(20)
    assert layer.put_off_bytes == 0


def test_the_loss_is_a_last_layer() -> None:
    target = torch.rand(8, 20)
    profile = profiled(
        nn.Linear(10, 20), sample=torch.rand(8, 10), target=target, loss_fn=F.mse_loss
    )

    assert profile.loss is not None
    assert profile.loss.output_bytes == float32()
    assert profile.loss.kept_input_bytes == float32(8, 20)
    assert profile.loss.kept_bytes == 0  # it keeps only the target, which is held anyway
    assert (profile.input_bytes, profile.target_bytes) == (float32(8, 10), float32(8, 20))
    assert len(profile.layers) == 1


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        hidden = x * 2
        yield stash("skip", hidden)
        return hidden.sin()


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x * skip


def test_skip_tensors() -> None:
    sample = torch.rand(8, 10, requires_grad=True)
    profile = profiled(nn.Identity(), Stash(), nn.Identity(), Pop(), sample=sample)

    (skip,) = profile.skips
    assert (skip.source, skip.destinations) == (1, (3,))
    assert skip.tensor_bytes == skip.kept_bytes == float32(8, 10)
    stashing, popping = profile.layers[1], profile.layers[3]
    assert stashing.kept_bytes == 0  # the sine keeps the stashed tensor, which counts as a skip
    assert (popping.kept_bytes, popping.kept_input_bytes) == (0, float32(8, 10))


@skippable(stash=["skip"])
class Exp(nn.Module):
    def forward(self, x):
        output = x.exp()  # which autograd saves
        yield stash("skip", output)
        return output


def test_of_a_skip_tensor_counts_what_is_saved_where_it_is_no_output() -> None:
    sample, size = torch.rand(8, 10, requires_grad=True), float32(8, 10)
    add = popper("skip")
    for first, last, kept in ((Exp(), add, 0), (Exp(), Pop(), size), (Stash(), add, size)):
        (skip,) = profiled(first, last, sample=sample).skips
        assert skip.kept_bytes == kept, (first, last)


def test_what_a_stage_does_not_split_is_in_the_first_half() -> None:
    """A layer with a forward of its own, as a user may set one, is no stock layer."""
    layer = nn.Linear(2, 2)
    layer.forward = partial(nn.Linear.forward, layer)  # type: ignore[method-assign]

    (found,) = profiled(layer, sample=torch.ones(1, 2)).layers

    assert (found.seconds["I"], found.put_off_bytes) == (found.seconds["B"], 0)


def test_an_input_may_be_given_by_name() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(10, 20)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.linear(input=x)
            return output

    (layer,) = profiled(ByName(), sample=torch.rand(8, 10)).layers

    assert layer.put_off_bytes == float32(8, 10) + float32(8, 20)


class Noting(nn.Linear):
    """Notes on which inputs it runs."""

    seen: ClassVar[list[torch.Size]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return super().forward(x)


def test_of_layers_that_are_alike_one_is_counted_for_all() -> None:
    blocks = []
    for k in range(12):
        parts = {f"linear{k}": Noting(8, 8), "dropout": nn.Dropout(0.1 * (k % 2))}
        blocks.append(nn.Sequential(OrderedDict(parts)))
        blocks[-1].layer_idx = k  # type: ignore[assignment]
    blocks[11][0].requires_grad_(False)
    layers = [*blocks, nn.Linear(8, 4), nn.Linear(4, 4, bias=False)]
    sample = torch.rand(4, 8)

    measured = profiled(*layers, sample=sample)
    Noting.seen.clear()
    estimated = profiled(*layers, sample=sample, flops_per_s=1.0)

    # The first one, whose input requires no gradient, then one of each kind, and the frozen one.
    assert len(Noting.seen) == 4
    for one, other in zip(estimated.layers, measured.layers, strict=True):
        assert replace(one, seconds={}) == replace(other, seconds={})
    assert [la.seconds["F"] for la in estimated.layers] == [2 * 4 * 64] * 12 + [
        2 * 4 * 32,
        2 * 4 * 16,
    ]


def test_layers_with_skip_tensors_are_counted_one_by_one() -> None:
    layers = [nn.Identity(), Stash(), nn.Identity(), nn.Identity(), Pop()]
    sample = torch.rand(8, 10, requires_grad=True)

    assert profiled(*layers, sample=sample, flops_per_s=1.0).skips == (
        profiled(*layers, sample=sample).skips
    )


def test_several_inputs() -> None:
    profile = profiled(nn.Bilinear(3, 4, 5), sample=Inputs(torch.rand(2, 3), torch.rand(2, 4)))

    assert profile.input_bytes == float32(2, 7)
