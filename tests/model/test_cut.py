"""A balance places every layer once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from procpipe.errors import BalanceError
from procpipe.model.cut import (
    check_balance,
    check_enough_layers,
    check_model,
    cut,
    layer_facts,
    replicas_for,
)
from tests.cases import for_each
from tests.model.layers import model_of_many_layers


def test_only_a_sequential_is_a_model() -> None:
    with pytest.raises(TypeError, match=r"a Linear: pass an nn\.Sequential"):
        check_model(nn.Linear(1, 1))
    with pytest.raises(
        TypeError, match=r"the model is a DataParallel, .* give Stage\(…, replicas="
    ):
        check_model(nn.DataParallel(nn.Sequential()))
    check_model(model_of_many_layers())


def test_an_empty_model_is_legal() -> None:
    check_model(nn.Sequential())
    assert check_balance([], 0) == ()
    assert cut(nn.Sequential(), ()) == []


def test_duplicate_children_are_all_named() -> None:
    linear, relu = nn.Linear(1, 1), nn.ReLU()
    with pytest.raises(
        ValueError, match=r"duplicate children: .*'0' and '2' are one Linear; .*'1' and '4' are one"
    ):
        check_model(nn.Sequential(linear, relu, linear, nn.ReLU(), relu))


def test_lazy_layers_must_have_been_called() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Tanh(), nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(
        ValueError, match=r"of '0' \(LazyLinear\), '2' \(Sequential\) have no shape"
    ):
        check_model(model)
    model(torch.ones(3, 4))
    check_model(model)


@for_each(
    "balance",
    [[2, 1, 3], (2, 1, 3), torch.tensor([2, 1, 3]), np.array([2, 1, 3]), iter([2, 1, 3])],
)
def test_balance_becomes_plain_integers(balance: Any) -> None:
    parts = check_balance(balance, 6)
    assert parts == (2, 1, 3)
    assert all(type(part) is int for part in parts)


@for_each(
    "balance",
    [
        *([True, 5], [1.0, 5], ["1", 5], [[1, 5]], [None, 6]),
        *(torch.tensor([1.0, 5]), torch.tensor([[6]]), torch.tensor([True]), np.array([True])),
    ],
    ids=repr,
)
def test_a_balance_of_other_types_is_refused(balance: Any) -> None:
    with pytest.raises(TypeError, match="holds more than integers: pass the number of layers"):
        check_balance(balance, 6)


def test_a_balance_that_is_no_sequence_is_refused() -> None:
    for balance in (6, None):
        with pytest.raises(TypeError, match=rf"the balance is {balance}: .* balance=\[6\]"):
            check_balance(balance, 6)  # type: ignore[arg-type]


@for_each("balance", [[2, 3], [6, 1], [], [7]])
def test_a_balance_with_a_wrong_sum_is_refused(balance: list[int]) -> None:
    with pytest.raises(
        BalanceError, match=rf"places {sum(balance)} layers but the model has 6: .* add up to 6"
    ):
        check_balance(balance, 6)


@pytest.mark.parametrize("balance", [[6, 0], [7, -1], [0, 1]])
def test_a_balance_with_an_empty_partition_is_refused(balance: list[int]) -> None:
    with pytest.raises(BalanceError, match="less than one layer: give each at least 1"):
        check_balance(balance, 6)


def test_cut_keeps_the_names() -> None:
    model = nn.Sequential()
    for name in ("stem", "body", "norm", "head"):
        model.add_module(name, nn.ReLU())
    partitions = cut(model, (1, 2, 1))
    assert [list(layers) for layers in partitions] == [["stem"], ["body", "norm"], ["head"]]
    assert [layer for layers in partitions for layer in layers.values()] == list(model)


def test_layer_facts_do_not_depend_on_the_device() -> None:
    assert layer_facts(model_of_many_layers("meta")) == layer_facts(model_of_many_layers())
    model = nn.Sequential(nn.Linear(300, 4), nn.ReLU(), nn.Sequential(nn.Linear(2, 1)))
    assert layer_facts(model) == [
        "0: Linear, 1,204 parameters",
        "1: ReLU, 0 parameters",
        "2: Sequential, 3 parameters",
    ]


def test_the_replicas_that_fit_are_the_fewest() -> None:
    assert replicas_for(8, 4, 1) == 2
    assert replicas_for(8, 4, 2) == 4
    assert replicas_for(8, 4, None) == 2
    assert replicas_for(8, 3, 1) is None
    assert replicas_for(4, 8, 1) is None


def test_more_partitions_than_layers_suggest_replicas_that_fit() -> None:
    for num_replicas, words in (
        (
            1,
            "cannot divide 5 layers into 8 .* 8 processes: start fewer, or give replicas=2, or",
        ),
        (2, None),
    ):
        with pytest.raises(BalanceError, match=words) if words else nullcontext():
            check_enough_layers(5, 8, num_replicas, lambda num_stages: num_stages)
    with pytest.raises(BalanceError, match=r"8 processes for 2 replicas: .* replicas=4, or"):
        check_enough_layers(5, 8, 2, lambda num_stages: 2 * num_stages)
    with pytest.raises(BalanceError, match=r"1 layer into .*: start fewer, or divide"):
        check_enough_layers(1, 3, 1, lambda num_stages: 2 * num_stages)


def test_more_partitions_than_layers_suggest_a_smaller_dimension_of_a_mesh() -> None:
    words = r"the mesh of this pipeline has 4 ranks, \[4, 5, 6, 7\]: give a dimension of size 2, or"
    with pytest.raises(BalanceError, match=words):
        check_enough_layers(3, 4, 1, lambda num_stages: num_stages, range(4, 8))
