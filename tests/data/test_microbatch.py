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


def rows(num_samples: int, num_columns: int = 2) -> torch.Tensor:
    values = torch.arange(num_samples * num_columns, dtype=torch.float64)
    return values.view(num_samples, num_columns)


def same(left: Any, right: Any) -> bool:
    """Return whether two nested values are equal in structure, values and dtypes."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


@for_each(
    ("batch_size", "chunks", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 4, [3, 3, 3, 1]),  # indivisible
        (12, 8, [2, 2, 2, 2, 2, 2]),  # fewer than ``chunks``, though the batch is larger
        (3, 8, [1, 1, 1]),  # a batch smaller than chunks
        (5, 1, [5]),
    ],
)
def test_sizes_of_micro_batches(batch_size: int, chunks: int, sizes: list[int]) -> None:
    assert scatter((rows(batch_size),), chunks)[1] == sizes
    assert scatter((rows(batch_size), None), chunks)[1] == sizes


def test_splits_exactly_as_torch_chunk() -> None:
    for batch_size in range(1, 20):
        for chunks in range(1, 12):
            tensor = rows(batch_size)
            expected = [(part,) for part in tensor.chunk(chunks)]
            alone, alone_sizes = scatter((tensor,), chunks)
            nested, nested_sizes = scatter(((tensor,),), chunks)
            assert same(alone, expected)
            assert same([inputs[0] for inputs in nested], expected)
            assert alone_sizes == nested_sizes == [len(part) for (part,) in expected]


def test_splits_nested_values_and_repeats_the_rest() -> None:
    x, mask, table = rows(3), torch.tensor([True, False, True]), rows(7)
    inputs = ((x, None), {"mask": [mask], 4: NoChunk(table)}, 0.5, "text", ())

    micro_batches, sizes = scatter(inputs, 2)

    assert sizes == [2, 1]
    assert same(
        micro_batches,
        [
            ((x[:2], None), {"mask": [mask[:2]], 4: table}, 0.5, "text", ()),
            ((x[2:], None), {"mask": [mask[2:]], 4: table}, 0.5, "text", ()),
        ],
    )
    assert micro_batches[0][1][4] is micro_batches[1][1][4] is table


def test_gradients_reach_the_input() -> None:
    x = rows(5).requires_grad_()
    micro_batches, _ = scatter((x,), 2)
    gather([3 * part for (part,) in micro_batches]).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3))


@for_each(
    "inputs",
    [(), (None,), ("text",), (("text", 3),), (42, "text"), ((), {}), (NoChunk(torch.ones(3)),)],
    ids=repr,
)
def test_input_without_a_tensor_to_split(inputs: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"no tensor to scatter.*pass at least one"):
        scatter(inputs, 2)


def test_batch_sizes_that_differ_name_both_places() -> None:
    with pytest.raises(
        ValueError, match=r"input\[0\] has 3 samples but input\[1\]\['a'\]\[0\] has 4.*NoChunk"
    ):
        scatter((rows(3), {"a": [rows(4)]}), 2)


@pytest.mark.parametrize("inputs", [(torch.tensor(1.0),), (rows(2), torch.tensor(1.0))])
def test_tensor_without_dimensions(inputs: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"input\[.\] is a tensor without dim.*wrap it in NoChunk"):
        scatter(inputs, 2)


@pytest.mark.parametrize("inputs", [(rows(0),), ([rows(0), rows(0)],)])
def test_empty_batch(inputs: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"batch is empty.*float64 \(0, 2\).*at least one sample"):
        scatter(inputs, 2)


class Pair:
    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


def test_types_that_hide_tensors_are_refused_not_repeated() -> None:
    pair = Pair(rows(2), rows(2))
    with pytest.raises(BoundaryError, match=r"\.Pair at input\[1\] cannot .*register_pytree_node"):
        scatter((rows(2), pair), 2)
    with pytest.raises(BoundaryError, match=r"\.Pair at target cannot"):
        scatter_like(pair, [1, 1])


def test_no_chunk_takes_a_tensor_only() -> None:
    tensor = torch.ones(2)
    assert NoChunk(tensor).tensor is tensor
    assert "tensor([" in repr(NoChunk(torch.ones(1)))
    with pytest.raises(TypeError, match="not a list: pass the value as it is"):
        NoChunk([torch.ones(1)])  # type: ignore[arg-type]


def test_target_is_split_like_the_input() -> None:
    x, labels = rows(10), torch.arange(10)
    _, sizes = scatter((x,), 4)
    assert same(scatter_like(labels, sizes), list(labels.chunk(4)))
    assert scatter_like(None, sizes) == [None] * 4
    weights = torch.ones(3)
    parts = scatter_like((labels, NoChunk(weights), 0.1), sizes)
    assert same(parts, [(part, weights, 0.1) for part in labels.chunk(4)])


def test_target_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"the input has 10 samples but target has 9"):
        scatter_like(torch.arange(9), [3, 3, 3, 1])
    with pytest.raises(ValueError, match=r"the input has 4 samples but target\['m'\] has 1"):
        scatter_like({"m": rows(1)}, [2, 2])
    with pytest.raises(ValueError, match=r"target is a tensor without dimensions.*NoChunk"):
        scatter_like(torch.tensor(1), [1])


def test_gathers_what_was_scattered() -> None:
    for batch_size in range(1, 10):
        x = rows(batch_size)
        micro_batches, _ = scatter(((x, [x + 1]), {"k": x * 2, "none": None}), 4)
        assert same(list(gather(micro_batches)), [(x, [x + 1]), {"k": x * 2, "none": None}])


def test_gather_of_one_micro_batch_is_the_same_object() -> None:
    for output in (rows(2), (rows(2), 5), torch.tensor(1.0), 5):
        assert gather([output]) is output


def test_gather_keeps_what_cannot_be_concatenated() -> None:
    outputs = [(rows(2), torch.tensor(float(i)), None, f"name {i}", i or None) for i in range(3)]
    merged = gather(outputs)
    expected = (torch.cat([rows(2)] * 3), torch.tensor([0.0, 1.0, 2.0]), None)
    assert same(merged[:3], expected)
    assert merged[3:] == (["name 0", "name 1", "name 2"], [None, 1, 2])


@for_each(
    ("outputs", "message"),
    [
        (
            [rows(1), rows(1), (rows(1),)],
            r"float64 \(1, 2\) in .* 0 but \(float64 .*,\) in .* 2",
        ),
        ([rows(1), None], "but None in micro-batch 1"),
        ([(rows(1),), [rows(1)]], r"\(float64 \(1, 2\),\) in .* but \[float64 \(1, 2\)\]"),
        ([[[1, 2]], [[1]]], r"\[\[1, 2\]\] in .* but \[\[1\]\]"),
        ([[1], [[1]]], r"\[1\] in .* but \[\[1\]\]"),
        ([{"a": 1, "b": 2}, {"b": 1}], r"\{'a': 1, 'b': 2\} in .* but \{'b': 1\}"),
    ],
)
def test_outputs_built_differently(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs)


def test_dicts_in_another_order_are_alike() -> None:
    assert gather([{"a": 1, 2: 0}, {2: 0, "a": 3}]) == {"a": [1, 3], 2: [0, 0]}


@for_each(
    "weights",
    [[0, -1], [1, -1], [3, -1], [math.nan, 1], [math.inf, 1], [math.inf, -1], [1e308, 1e308]],
    ids=repr,
)
def test_weights_that_are_no_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="each must be a finite number from 0"):
        Loss(None, float).weights(weights, [1] * len(weights))
