"""The table of layers: sums, each value counted once, and seconds of measured tasks."""

from __future__ import annotations

from typing import Any

import pytest

from procpipe.planner.costs import Layer, Machine, Skip, Table, Tie, task_seconds


def layer(
    forward_s: float = 1.0, backward_s: float = 2.0, first_s: float | None = None, **sizes: Any
) -> Layer:
    seconds = task_seconds(forward_s, backward_s, input_gradient_s=first_s)
    return Layer("", seconds, **{"output_bytes": 10} | sizes)


def test_a_partition_costs_the_sum_of_its_layers() -> None:
    layers = [
        layer(forward_s=1.0, backward_s=10.0, output_bytes=100, put_off_bytes=3),
        layer(forward_s=2.0, backward_s=20.0, output_bytes=200, put_off_bytes=4),
        layer(forward_s=4.0, backward_s=40.0, first_s=30.0),
    ]
    loss = layer(forward_s=8.0, backward_s=80.0, output_bytes=4)
    model = Table(1, tuple(layers), loss, input_bytes=7, target_bytes=5)

    costs = model.costs([2, 1], Machine(0.25, 0.5, 2.0, 3.0))

    assert costs.seconds == {
        "F": [3, 12],
        "R": [3, 12],
        "B": [30, 120],
        "I": [15, 70],  # half where it was not measured
        "W": [15, 50],
    }
    assert costs.machine == Machine(0.25, 0.5, 2.0, 3.0)
    assert [one.output_bytes for one in costs.partitions] == [200, 4]  # the loss is a last layer
    assert (costs.input_bytes, costs.target_bytes) == (7, 5)
    assert [one.put_off_bytes for one in costs.partitions] == [7, 0]


def test_the_seconds_of_layers_add_up_to_those_of_measured_tasks() -> None:
    rows = (layer(), layer(forward_s=3.0, backward_s=6.0, first_s=2.0), layer())
    table = Table(1, rows, loss=layer())
    whole = {("F", 0): 8.0, ("B", 0): 4.0, ("F", 1): 1.0, ("B", 1): 8.0, ("R", 1): 0.5}

    seconds = table.timed([2, 1], whole).costs([2, 1]).seconds

    assert (seconds["F"], seconds["B"], seconds["R"]) == ([8, 1], [4, 8], [8, 0.5])
    assert (seconds["I"], seconds["W"]) == ([1.5, 4], [2.5, 4])
    assert [round(la.seconds["F"], 9) for la in table.timed([2, 1], whole).layers] == [2, 6, 0.5]
    split = {("F", 0): 4.0, ("I", 0): 6.0, ("W", 0): 10.0}
    seconds = table.timed([3], split | {("F", 0): 6.0}).costs([3]).seconds
    assert (seconds["I"], seconds["W"], seconds["B"]) == ([6.0], [10.0], [16.0])


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
    assert [one.kept_bytes for one in model.costs([4]).partitions] == [12]
    assert [one.kept_bytes for one in model.costs([3, 1]).partitions] == [5, 0]


def test_what_layers_share_counts_once_on_each_stage() -> None:
    layers = tuple(layer(parameter_bytes=100, trained_bytes=90) for _ in range(4))
    ties = (Tie((0, 1, 3), 50, 50), Tie((0, 3), 10, 0))
    model = Table(1, layers, ties=ties)
    whole = 100 + 3 * 90  # a layer, with two states

    assert model.static_bytes([4], [0], 2.0) == (4 * whole - 2 * 4 * 50 - 10,)
    assert model.static_bytes([2, 2], [0, 1], 2.0) == (2 * whole - 4 * 50, 2 * whole)
    assert model.static_bytes([1, 1, 1, 1], [0, 1, 1, 0], 2.0) == (
        2 * whole - 4 * 50 - 10,
        2 * whole,
    )


def test_gradients_that_replicas_add_up() -> None:
    layers = tuple(layer(trained_bytes=15) for _ in range(4))
    table = Table(1, layers, layer(trained_bytes=1), ties=(Tie((0, 3), 5, 5),))

    assert [one.trained_bytes for one in table.costs([2, 2]).partitions] == [30, 31]
    assert [one.trained_bytes for one in table.costs([4]).partitions] == [56]  # what two have, once


@pytest.mark.parametrize("balance", [[1, 1], [4, 0], [1, 3]])
def test_a_balance_of_other_layers_is_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="is not one of 3 layers"):
        Table(1, (layer(),) * 3).costs(balance)
