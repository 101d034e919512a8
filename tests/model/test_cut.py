"""A balance places every layer once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from procpipe.errors import BalanceError
from procpipe.model.cut import check_balance, check_model, layer_facts
from tests.cases import for_each


@for_each("balance", [(2, 1, 3), torch.tensor([2, 1, 3]), np.array([2, 1, 3]), iter([2, 1, 3])])
def test_balance_becomes_plain_integers(balance: Any) -> None:
    parts = check_balance(balance, 6)
    assert parts == [2, 1, 3]
    assert all(type(part) is int for part in parts)


LINEAR, RELU = nn.Linear(1, 1), nn.ReLU()


@for_each(
    ("model", "error", "message"),
    [
        (LINEAR, TypeError, r"a Linear: pass an nn\.Sequential"),
        (nn.Linear, TypeError, r"the class Linear: pass an nn\.Module, that is, an instance"),
        (lambda x: x, TypeError, r"a function: pass an nn\.Module"),
        (nn.DataParallel(nn.Sequential()), TypeError, "a DataParallel, .* give Stage.…, replicas="),
        (
            nn.Sequential(LINEAR, RELU, LINEAR, nn.ReLU(), RELU),
            ValueError,
            "duplicate children: .*'0' and '2' are one Linear; .*'1' and '4' are one",
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        check_model(model)


OTHER_TYPE = r"the balance is .*: give the number of layers of each .* balance=\[6\]"
EMPTY = "less than one layer: give each at least 1"


@for_each(
    ("balance", "error", "message"),
    [
        *[([value, 5], TypeError, OTHER_TYPE) for value in (1.0, "1", None, [1])],
        (torch.tensor([1.0, 5]), TypeError, OTHER_TYPE),
        (6, TypeError, OTHER_TYPE),
        ([2, 3], BalanceError, "places 5 layers but the model has 6: .* add up to 6"),
        ([6, 1], BalanceError, "places 7 layers but the model has 6: .* add up to 6"),
        ([], BalanceError, "places 0 layers but the model has 6"),
        *[(balance, BalanceError, EMPTY) for balance in ([6, 0], [7, -1], [0, 1])],
    ],
)
def test_a_balance_that_is_none_is_refused(balance: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        check_balance(balance, 6)


def model_of_many_layers(device: str = "cpu") -> nn.Sequential:
    """Return a model with every kind of layer to initialise; it runs no forward."""
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(3, 4),
            nn.ReLU(),
            nn.Sequential(nn.Conv1d(2, 4, 1, bias=False), nn.BatchNorm1d(4)),
            nn.TransformerEncoderLayer(8, 2, dim_feedforward=4),
            nn.LSTM(2, 3),
            nn.Embedding(5, 2, padding_idx=0),
        )


def test_layer_facts_do_not_depend_on_the_device() -> None:
    assert layer_facts(model_of_many_layers("meta")) == layer_facts(model_of_many_layers())
    model = nn.Sequential(nn.Linear(300, 4), nn.ReLU(), nn.Sequential(nn.Linear(2, 1)))
    assert layer_facts(model) == [
        "0: Linear, 1,204 parameters",
        "1: ReLU, 0 parameters",
        "2: Sequential, 3 parameters",
    ]
