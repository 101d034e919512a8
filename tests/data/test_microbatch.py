"""Scatter and gather: equal to torch.chunk and torch.cat, with clear errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from procpipe.data.loss import Loss
from procpipe.data.microbatch import NoChunk, gather, scatter, scatter_like
from procpipe.errors import BoundaryError
from tests.cases import for_each
from tests.dist.stages import assert_same


def rows(num_samples: int, num_columns: int = 2) -> torch.Tensor:
    values = torch.arange(num_samples * num_columns, dtype=torch.float64)
    return values.view(num_samples, num_columns)


def test_splits_exactly_as_torch_chunk() -> None:
    for batch_size in range(1, 20):
        for chunks in range(1, 12):
            tensor = rows(batch_size)
            expected = [(part,) for part in tensor.chunk(chunks)]
            alone, alone_sizes = scatter((tensor,), chunks)
            nested, nested_sizes = scatter(((tensor,),), chunks)
            assert_same(alone, expected, "")
            assert_same([inputs[0] for inputs in nested], expected, "")
            assert alone_sizes == nested_sizes == [len(part) for (part,) in expected]


def test_splits_nested_values_and_repeats_the_rest() -> None:
    x, mask, table = rows(3), torch.tensor([True, False, True]), rows(7)
    inputs = ((x, None), {"mask": [mask], 4: NoChunk(table)}, 0.5, "text", ())

    micro_batches, sizes = scatter(inputs, 2)

    assert sizes == [2, 1]
    expected = [
        ((x[:2], None), {"mask": [mask[:2]], 4: table}, 0.5, "text", ()),
        ((x[2:], None), {"mask": [mask[2:]], 4: table}, 0.5, "text", ()),
    ]
    assert_same(micro_batches, expected, "micro-batches")
    assert micro_batches[0][1][4] is micro_batches[1][1][4] is table


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


def test_target_is_split_like_the_input() -> None:
    x, labels = rows(10), torch.arange(10)
    _, sizes = scatter((x,), 4)
    assert_same(scatter_like(labels, sizes), list(labels.chunk(4)), "")
    assert scatter_like(None, sizes) == [None] * 4
    weights = torch.ones(3)
    parts = scatter_like((labels, NoChunk(weights), 0.1), sizes)
    assert_same(parts, [(part, weights, 0.1) for part in labels.chunk(4)], "")


def test_gather_keeps_what_cannot_be_concatenated() -> None:
    outputs = [(rows(2), torch.tensor(float(i)), None, f"name {i}", i or None) for i in range(3)]
    merged = gather(outputs)
    expected = (torch.cat([rows(2)] * 3), torch.tensor([0.0, 1.0, 2.0]), None)
    assert_same(merged[:3], expected, "")
    assert merged[3:] == (["name 0", "name 1", "name 2"], [None, 1, 2])


def test_gather_of_one_micro_batch_is_the_same_object() -> None:
    for output in (rows(2), (rows(2), 5), torch.tensor(1.0), 5):
        assert gather([output]) is output


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
