"""The table of layers: sums, each value counted once, and seconds of measured tasks."""

from __future__ import annotations

from typing import Any

import pytest

from procpipe.planner.layers import Layer, Machine, Skip, Table, Tie


def layer(name: str = "", **costs: Any) -> Layer:
    given: dict[str, Any] = {"forward_s": 1.0, "backward_s": 2.0, "output_bytes": 10} | costs
    return Layer(name, **given)


def test_a_partition_costs_the_sum_of_its_layers() -> None:
    layers = [
        layer(forward_s=1.0, backward_s=10.0, output_bytes=100, put_off_bytes=3),
        layer(forward_s=2.0, backward_s=20.0, output_bytes=200, put_off_bytes=4),
        layer(forward_s=4.0, backward_s=40.0, input_gradient_s=30.0),
    ]
    loss = layer(forward_s=8.0, backward_s=80.0, output_bytes=4)
    model = Table(1, tuple(layers), loss, input_bytes=7, target_bytes=5)

    costs: Any = model.costs([2, 1], Machine(0.25, 0.5, 2.0, 3.0))

    assert [costs.forward_s, costs.recompute_s] == [(3, 12)] * 2
    assert costs.backward_s == (30, 120)
    assert costs.input_gradient_s == (15, 70)  # half where it was not measured
    assert costs.weight_gradient_s == (15, 50)
    assert (costs.host_s, costs.send_s, costs.transfer_s, costs.step_s) == (0.25, 0.5, 2, 3)
    assert costs.output_bytes == (200, 4)  # the loss is a last layer
    assert (costs.input_bytes, costs.target_bytes) == (7, 5)
    assert costs.put_off_bytes == (7, 0)


def test_the_seconds_of_layers_add_up_to_those_of_measured_tasks() -> None:
    rows = (layer(), layer(forward_s=3.0, backward_s=6.0, input_gradient_s=2.0), layer())
    table = Table(1, rows, loss=layer("(loss)"))
    whole = {("F", 0): 8.0, ("B", 0): 4.0, ("F", 1): 1.0, ("B", 1): 8.0, ("R", 1): 0.5}

    costs = table.timed([2, 1], whole).costs([2, 1])

    assert (costs.forward_s, costs.backward_s, costs.recompute_s) == ((8, 1), (4, 8), (8, 0.5))
    assert (costs.input_gradient_s, costs.weight_gradient_s) == ((1.5, 4), (2.5, 4))
    assert [round(la.forward_s, 9) for la in table.timed([2, 1], whole).layers] == [2, 6, 0.5]
    split = {("F", 0): 4.0, ("I", 0): 6.0, ("W", 0): 10.0}
    costs = table.timed([3], split | {("F", 0): 6.0}).costs([3])
    assert (costs.input_gradient_s, costs.weight_gradient_s, costs.backward_s) == (
        (6.0,), (10.0,), (16.0,),
    )  # fmt: skip


def test_skip_tensors_are_sent_once_to_each_partition() -> None:
    skips = (
        Skip(0, (2, 3), 5, 5),
        Skip(1, (3,), 7, 7),
    )
    model = Table(1, (layer(),) * 4, skips=skips)

    assert model.costs([4]).skip_bytes == {}
    assert model.costs([2, 2]).skip_bytes == {(0, 1): 12}
    assert model.costs([3, 1]).skip_bytes == {(0, 1): 12}
    assert model.costs([1, 1, 1, 1]).skip_bytes == {(0, 2): 5, (0, 3): 5, (1, 3): 7}
    # A skip tensor within a partition is kept there by the layer that pops it.
    assert model.costs([4]).saved_bytes == (12,)
    assert model.costs([3, 1]).saved_bytes == (5, 0)


def test_what_layers_share_counts_once_on_each_stage() -> None:
    layers = tuple(layer(parameter_bytes=100, trained_bytes=90) for _ in range(4))
    ties = (Tie("0.w", (0, 1, 3), 50), Tie("0.buffer", (0, 3), 10, is_trained=False))
    model = Table(1, layers, ties=ties)
    whole = 100 + 3 * 90  # a layer, with two states

    assert model.static_bytes([4], [0], 2.0) == (4 * whole - 2 * 4 * 50 - 10,)
    assert model.static_bytes([2, 2], [0, 1], 2.0) == (2 * whole - 4 * 50, 2 * whole)
    assert model.static_bytes([1, 1, 1, 1], [0, 1, 1, 0], 2.0) == (
        2 * whole - 4 * 50 - 10,
        2 * whole,
    )
    assert model.costs([1, 1, 1, 1]).tied_bytes == {(0, 1, 3): 50}
    assert model.costs([4]).tied_bytes == {}


def test_gradients_that_replicas_add_up() -> None:
    layers = tuple(layer(trained_bytes=15) for _ in range(4))
    table = Table(1, layers, layer("(loss)"), ties=(Tie("0.w", (0, 3), 5),))

    assert table.costs([2, 2], num_replicas=2).gradient_bytes == (30, 30)
    assert table.costs([4], num_replicas=2).gradient_bytes == (55,)  # what two layers have, once


@pytest.mark.parametrize("balance", [[1, 1], [4, 0], [1, 3]])
def test_a_balance_of_other_layers_is_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="is not one of 3 layers"):
        Table(1, (layer(),) * 3).costs(balance)
