"""Costs of partitions from those of layers: sums, straight lines, and each value counted once."""

from __future__ import annotations

from typing import Any

import pytest

from procpipe.planner.model import Layer, Link, Model, Skip, TiedLayers
from tests.cases import for_each


def layer(name: str = "", **costs: Any) -> Layer:
    given: dict[str, Any] = {
        "forward_s": (1.0,),
        "backward_s": (2.0,),
        "output_bytes": (10.0,),
    } | costs
    return Layer(name, **given)


def saved(balance: list[int], *layers: Layer, skips: tuple[Skip, ...] = ()) -> tuple[int, ...]:
    return Model((1,), layers, skips=skips).costs(balance, 1, Link()).saved_bytes


def test_a_partition_costs_the_sum_of_its_layers() -> None:
    layers = [
        layer(forward_s=(1.0,), backward_s=(10.0,), output_bytes=(100.0,), put_off_bytes=(3.0,)),
        layer(forward_s=(2.0,), backward_s=(20.0,), output_bytes=(200.0,), put_off_bytes=(4.0,)),
        layer(forward_s=(4.0,), backward_s=(40.0,), input_gradient_s=(30.0,)),
    ]
    loss = layer(forward_s=(8.0,), backward_s=(80.0,), output_bytes=(4.0,))
    model = Model((1,), tuple(layers), loss, input_bytes=(7.0,), target_bytes=(5.0,))

    costs: Any = model.costs([2, 1], 1, Link(0.5, 100.0))

    assert [costs.forward_s, costs.recompute_s] == [(3, 12)] * 2
    assert costs.backward_s == (30, 120)
    assert costs.input_gradient_s == (15, 70)  # half where it was not measured
    assert costs.weight_gradient_s == (15, 50)
    assert costs.transfer_s == (2.5,)  # 0.5 s, and 200 bytes at 100 a second
    assert costs.output_bytes == (200, 4)  # the loss is a last layer
    assert (costs.input_bytes, costs.target_bytes) == (7, 5)
    assert costs.put_off_bytes == (7, 0)


def test_every_task_has_a_start() -> None:
    model = Model((1,), (layer(), layer()), start_s=(0.25, 0.5))

    costs = model.costs([2], 1, Link())

    assert (costs.forward_s, costs.backward_s, costs.input_gradient_s) == ((2.25,), (4.5,), (2.5,))


@for_each(("num_samples", "seconds"), [(2, 10), (3, 15), (4, 20), (8, 60), (10, 80), (1, 5)])
def test_costs_between_two_sizes_are_interpolated(num_samples: int, seconds: float) -> None:
    model = Model((2, 4, 8), (layer(forward_s=(10.0, 20.0, 60.0), backward_s=(0.0, 0.0, 0.0)),))

    assert model.layer_seconds(num_samples) == [seconds]


def test_with_one_size_costs_are_proportional() -> None:
    assert Model((4,), (layer(),)).layer_seconds(8) == [6]


def test_a_value_that_two_layers_keep_is_counted_once() -> None:
    maker = layer(kept_bytes=(1.0,), kept_output_bytes=(10.0,))
    user = layer(kept_bytes=(2.0,), kept_input_bytes=(10.0,))

    assert saved([2], maker, user) == (13,)
    # Cut between the two, it is the output of one and the input of the other, counted elsewhere.
    assert saved([1, 1], maker, user) == (1, 2)


def test_a_value_that_no_layer_keeps_is_not_counted() -> None:
    assert saved([3], layer(), layer(kept_bytes=(1.0,)), layer()) == (1,)


def test_values_in_the_same_memory_count_once() -> None:
    # Linear -> ReLU(inplace) -> Linear: the ReLU and the second Linear keep the same memory.
    linear = layer(kept_input_bytes=(10.0,))
    relu = layer(kept_output_bytes=(10.0,), is_in_place=True)

    assert saved([3], linear, relu, linear) == (10,)
    # A partition that begins with the ReLU has its output in the memory of the input;
    assert saved([1, 2], linear, relu, linear) == (0, 0)
    # in a partition that ends with the ReLU it is the partition's output.
    assert saved([2, 1], linear, relu, linear) == (0, 0)


def test_skip_tensors_are_sent_once_to_each_partition() -> None:
    skips = (
        Skip(0, (2, 3), (5.0,), (5.0,)),
        Skip(1, (3,), (7.0,), (7.0,)),
    )
    model = Model((1,), (layer(),) * 4, skips=skips)

    assert model.costs([4], 1, Link()).skip_bytes == {}
    assert model.costs([2, 2], 1, Link()).skip_bytes == {(0, 1): 12}
    assert model.costs([3, 1], 1, Link()).skip_bytes == {(0, 1): 12}
    assert model.costs([1, 1, 1, 1], 1, Link()).skip_bytes == {(0, 2): 5, (0, 3): 5, (1, 3): 7}
    # A skip tensor within a partition is kept there by the layer that pops it.
    assert model.costs([4], 1, Link()).saved_bytes == (12,)
    assert model.costs([3, 1], 1, Link()).saved_bytes == (5, 0)


def test_parameters_gradients_and_optimizer() -> None:
    layers = (
        layer(parameter_bytes=100, trained_bytes=100),
        layer(parameter_bytes=30, trained_bytes=10),
    )

    model = Model((1,), layers)

    assert model.static_bytes([1, 1], [0, 1], 0.0) == (200, 40)
    assert model.static_bytes([1, 1], [0, 1], 2.0) == (400, 60)
    assert model.static_bytes([1, 1], [0, 0], 2.0) == (460,)
    assert model.static_bytes([2], [0], 2.0) == (460,)


def test_what_layers_share_counts_once_on_each_stage() -> None:
    layers = tuple(layer(parameter_bytes=100, trained_bytes=90) for _ in range(4))
    ties = (TiedLayers("0.w", (0, 1, 3), 50), TiedLayers("0.buffer", (0, 3), 10, is_trained=False))
    model = Model((1,), layers, ties=ties)
    whole = 100 + 3 * 90  # a layer, with two states

    assert model.static_bytes([4], [0], 2.0) == (4 * whole - 2 * 4 * 50 - 10,)
    assert model.static_bytes([2, 2], [0, 1], 2.0) == (2 * whole - 4 * 50, 2 * whole)
    assert model.static_bytes([1, 1, 1, 1], [0, 1, 1, 0], 2.0) == (
        2 * whole - 4 * 50 - 10,
        2 * whole,
    )
    assert model.costs([1, 1, 1, 1], 1, Link()).tied_bytes == {(0, 1, 3): 50}
    assert model.costs([4], 1, Link()).tied_bytes == {}
    costs = model.costs([2, 2], 1, Link(0.5, 100.0))
    assert (costs.tied_bytes, costs.tied_s) == ({(0, 1): 50}, {(0, 1): 1.0})


def test_links_in_a_ring() -> None:
    link = Link(0.5, 100.0)

    assert link.all_reduce_s(400, 4) == 6 * (0.5 + 1.0)  # 2(R-1) messages of an R-th
    assert link.all_gather_s(400, 4) == 3 * (0.5 + 4.0)
    assert link.all_reduce_s(400, 1) == link.all_gather_s(400, 1) == 0


def test_gradients_that_replicas_add_up() -> None:
    mib = 2**20
    layers = tuple(layer(backward_s=(s,), trained_bytes=15 * mib) for s in (1.0, 1.0, 3.0, 1.0))
    loss, link = layer(backward_s=(1.0,)), Link(0.0, mib)
    ties = (TiedLayers("0.w", (0, 3), 5 * mib),)
    model = Model((1,), layers, loss, ties=ties)

    def buckets(balance: list[int], placement: list[int]) -> list[list[tuple[Any, ...]]]:
        found = model.buckets(balance, placement, 1, link, 2)
        return [[(size / mib, s, final) for size, s, final in of_stage] for of_stage in found]

    # 15 and 10 MiB fit into a bucket of 25. The loss's backward comes first; the tie is apart.
    assert buckets([2, 2], [0, 1]) == [
        [(25, 25, ((0, 1.0),)), (5, 5, ())],
        [(25, 25, ((1, 1.0),)), (5, 5, ())],
    ]
    # On one stage it counts once, in its first layer.
    assert buckets([2, 2], [0, 0]) == [
        [(25, 25, ((1, 1.0),)), (15, 15, ((0, 0.5),)), (15, 15, ((0, 1.0),))]
    ]
    assert buckets([4], [0]) == [
        [(25, 25, ((0, 5 / 7),)), (15, 15, ((0, 6 / 7),)), (15, 15, ((0, 1.0),))]
    ]
    (large,) = Model((1,), (layer(trained_bytes=60 * mib),)).buckets([1], [0], 1, link, 2)
    assert [bucket.num_bytes / mib for bucket in large] == [25, 25, 10]


@pytest.mark.parametrize("balance", [[1, 1], [4, 0], [1, 3]])
def test_a_balance_of_other_layers_is_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="is not one of 3 layers"):
        Model((1,), (layer(),) * 3).costs(balance, 1, Link())
