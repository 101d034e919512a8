"""What cannot be scattered, weighed or gathered; all else is compared by tests/fuzz."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from procpipe.data.loss import Loss
from procpipe.data.microbatch import NoChunk, gather, scatter, scatter_like
from procpipe.errors import BoundaryError
from tests.cases import for_each


def rows(num_samples: int, num_columns: int = 2) -> torch.Tensor:
    values = torch.arange(num_samples * num_columns, dtype=torch.float64)
    return values.view(num_samples, num_columns)


class Pair:
    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


NO_TENSOR = r"no tensor to scatter.*pass at least one"
NO_DIMENSIONS = r"input\[.\] is a tensor without dim.*wrap it in NoChunk"
EMPTY = r"batch is empty.*float64 \(0, 2\).*at least one sample"
OTHER_TYPE = r"\.Pair at input\[1\] cannot .*register_pytree_node"


@for_each(
    ("inputs", "error", "message"),
    [
        ((), TypeError, NO_TENSOR),
        ((None, ("text", 3), {}), TypeError, NO_TENSOR),
        ((NoChunk(torch.ones(3)),), TypeError, NO_TENSOR),
        (
            (rows(3), {"a": [rows(4)]}),
            ValueError,
            r"input\[0\] has 3 samples but input\[1\]\['a'\]\[0\] has 4.*NoChunk",
        ),
        ((torch.tensor(1.0),), ValueError, NO_DIMENSIONS),
        ((rows(2), torch.tensor(1.0)), ValueError, NO_DIMENSIONS),
        ((rows(0),), ValueError, EMPTY),
        (([rows(0), rows(0)],), ValueError, EMPTY),
        ((rows(2), Pair(rows(2), rows(2))), BoundaryError, OTHER_TYPE),
    ],
    ids=repr,
)
def test_inputs_that_cannot_be_scattered(inputs: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        scatter(inputs, 2)


@for_each(
    ("target", "sizes", "error", "message"),
    [
        (torch.arange(9), [3, 3, 3, 1], ValueError, "input has 10 samples but target has 9"),
        ({"m": rows(1)}, [2, 2], ValueError, r"input has 4 samples but target\['m'\] has 1"),
        (torch.tensor(1), [1], ValueError, "target is a tensor without dimensions.*NoChunk"),
        (Pair(rows(2), rows(2)), [1, 1], BoundaryError, r"\.Pair at target cannot"),
    ],
)
def test_targets_that_cannot_be_scattered(
    target: Any, sizes: list[int], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        scatter_like(target, sizes)


def test_a_target_without_leaves_is_repeated() -> None:
    assert scatter_like((), [2, 1]) == [(), ()]


@for_each(
    ("outputs", "message"),
    [
        ([rows(1), rows(1), (rows(1),)], r"float64 \(1, 2\) in .* 0 but \(float64 .*,\) in .* 2"),
        ([rows(1), None], "but None in micro-batch 1"),
        ([(rows(1),), [rows(1)]], r"\(float64 \(1, 2\),\) in .* but \[float64 \(1, 2\)\]"),
        ([[[1, 2]], [[1]]], r"\[\[1, 2\]\] in .* but \[\[1\]\]"),
        ([{"a": 1, "b": 2}, {"b": 1}], r"\{'a': 1, 'b': 2\} in .* but \{'b': 1\}"),
    ],
)
def test_outputs_built_differently(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs)


@for_each(
    "weights",
    [[0, -1], [1, -1], [3, -1], [math.nan, 1], [math.inf, 1], [math.inf, -1], [1e308, 1e308]],
    ids=repr,
)
def test_weights_that_are_no_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="each must be a finite number from 0"):
        Loss(None, float).weights(torch.tensor(weights, dtype=torch.float64), [1] * len(weights))
