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


@for_each(
    "balance",
    [[2, 1, 3], (2, 1, 3), torch.tensor([2, 1, 3]), np.array([2, 1, 3]), iter([2, 1, 3])],
)
def test_balance_becomes_plain_integers(balance: Any) -> None:
    parts = check_balance(balance, 6)
    assert parts == (2, 1, 3)
    assert all(type(part) is int for part in parts)


def lazy_model() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(2), nn.Tanh(), nn.Sequential(nn.LazyBatchNorm1d()))


LINEAR, RELU = nn.Linear(1, 1), nn.ReLU()


@for_each(
    ("model", "error", "message"),
    [
        (LINEAR, TypeError, r"a Linear: pass an nn\.Sequential"),
        (nn.DataParallel(nn.Sequential()), TypeError, "a DataParallel, .* give Stage.…, replicas="),
        (
            nn.Sequential(LINEAR, RELU, LINEAR, nn.ReLU(), RELU),
            ValueError,
            "duplicate children: .*'0' and '2' are one Linear; .*'1' and '4' are one",
        ),
        (lazy_model(), ValueError, r"of '0' \(LazyLinear\), '2' \(Sequential\) have no shape"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        check_model(model)


def test_lazy_layers_are_legal_once_they_have_been_called() -> None:
    model = lazy_model()
    model(torch.ones(3, 4))
    check_model(model)


OTHER_TYPE = "holds more than integers: pass the number of layers"
EMPTY = "less than one layer: give each at least 1"


@for_each(
    ("balance", "error", "message"),
    [
        *[([value, 5], TypeError, OTHER_TYPE) for value in (True, 1.0, "1", None, [1])],
        *[(torch.tensor(of), TypeError, OTHER_TYPE) for of in ([1.0, 5], [[6]], [True])],
        (np.array([True]), TypeError, OTHER_TYPE),
        (6, TypeError, r"the balance is 6: .* balance=\[6\]"),
        (None, TypeError, r"the balance is None: .* balance=\[6\]"),
        ([2, 3], BalanceError, "places 5 layers but the model has 6: .* add up to 6"),
        ([6, 1], BalanceError, "places 7 layers but the model has 6: .* add up to 6"),
        ([], BalanceError, "places 0 layers but the model has 6"),
        *[(balance, BalanceError, EMPTY) for balance in ([6, 0], [7, -1], [0, 1])],
    ],
)
def test_a_balance_that_is_none_is_refused(balance: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
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
