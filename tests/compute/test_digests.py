"""A layer whose recomputation differs is detected; rounding is no difference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from procpipe.compute.digests import Digests, difference
from tests.cases import for_each
from tests.compute.sizes import Sizes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def compare(first: Any, again: Any, is_coarse=False):
    """Compare two runs of one layer, given its input and its output in each."""
    digests = Digests()
    digests_of_runs: list[Any] = [digests.start()]
    for place, value in enumerate(first, start=-1):
        digests.add(place, value)
    digests.stop()
    digests.start_again(digests_of_runs[0])
    for place, value in enumerate(again, start=-1):
        digests.add(place, value)
    digests_of_runs.append(digests.stop())
    found = difference(*digests_of_runs, is_coarse=is_coarse)
    return found.place if found else None


def outputs(dtype=torch.float32, size=70_000):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(3)]


@for_each("dtype", DTYPES, ids=str)
def test_the_first_layer_that_differs_is_named(dtype):
    x, y, z = outputs(dtype)
    assert compare([x, y, z], [x, y, z]) is None
    assert compare([x, y, z], [x, y.roll(1), z.roll(1)]) == 0
    assert compare([x, y, z], [x, y, nn.functional.dropout(z, 0.1)]) == 1
    assert compare([x, y, z], [x, y * 1.1, z]) == 0
    swapped = torch.cat([y[2**16 :], y[: 2**16]])
    assert compare([x, y, z], [x, swapped, z]) == 0
    assert compare([x, y, z], [x, y, z], is_coarse=True) is None
    assert compare([x, y, z], [x, y, z.flip(0)], is_coarse=True) == 1


def test_swapped_chunks_are_a_difference():
    x, y = torch.randn(2, 4 * 2**16)
    swapped = y.view(4, -1)[[1, 0, 2, 3]].flatten()
    assert compare([x, y], [x, swapped]) == 0


@for_each("dtype", DTYPES, ids=str)
def test_rounding_is_no_difference(dtype):
    x, y, z = outputs(dtype)
    eps = torch.finfo(dtype).eps
    noise = 1 + eps * torch.randn(y.shape, dtype=torch.float64)
    rounded = (y.double() * noise).to(dtype)
    assert compare([x, y, z], [x, rounded, z]) is None
    # The mean is rounding only.
    centred = y - y.mean()
    mean = centred.mean()
    assert compare([x, centred, mean], [x, centred, mean + eps]) is None


def test_amplified_rounding_is_no_difference():
    x, y, z = outputs()
    rounded = y * (1 + 1e-6)
    assert compare([x, y, z], [x, rounded, z * 1.01]) is None
    assert compare([x, y, z], [x, y, z * 1.01]) == 1
    assert compare([x, y, z], [x, rounded, nn.functional.dropout(z, 0.1)]) == 1


def test_another_order_of_layers_is_a_difference():
    x, y, _ = outputs()
    digests = Digests()
    digests_of_runs: list[Any] = [digests.start()]
    digests.add(-1, x)
    digests.add(0, y)
    digests.stop()
    digests.start_again(digests_of_runs[0])
    digests.add(-1, x)
    digests.add(1, y)
    digests_of_runs.append(digests.stop())
    assert difference(*digests_of_runs, is_coarse=False) is not None


def test_one_changed_element_of_many_is_detected():
    x, y, _ = outputs()
    changed = y.clone()
    changed[60_000] += 1
    assert compare([x, y], [x, changed]) == 0


def test_values_that_are_not_finite_are_compared_too():
    x, y, _ = outputs()
    y[7], y[8], y[9] = float("nan"), float("inf"), -float("inf")
    assert compare([x, y], [x, y.clone()]) is None
    moved = y.clone()
    moved[7], moved[1000] = 0.0, float("nan")
    assert compare([x, y], [x, moved]) == 0
    assert compare([x, y.nan_to_num()], [x, y]) == 0


@for_each(
    "value",
    [
        None,
        (),
        3,
        "text",
        torch.empty(0, 3),
        torch.tensor(1.0),
        torch.arange(6).view(2, 3).T,
        torch.tensor([True, False]),
        torch.zeros(5),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(2, 2).to_sparse(),
        torch.empty(3, device="meta"),
        {"a": [torch.ones(2), (None, torch.ones(3))], "b": object()},
        nn.Parameter(torch.ones(2)),
        torch.full((3,), 1e300, dtype=torch.float64),
    ],
    ids=lambda value: str(type(value)),
)
def test_any_output_can_be_compared(value):
    assert compare([torch.ones(2), value], [torch.ones(2), value]) is None
    assert compare([torch.ones(2), value], [torch.ones(2), torch.ones(7)]) == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 1, 1000).expand(50, 20, 1000),
        torch.ones(1).expand(1_000_000),
        torch.ones(2).expand(3, 1, 100_000, 2),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_no_copy_is_made_of_a_large_tensor(tensor):
    with Sizes() as sizes:
        assert compare([tensor], [tensor]) is None
    assert sizes.most <= 8 * 4 * 2**16  # the random vectors


def test_strides_are_no_difference():
    x = torch.randn(20, 300, 50, 2, generator=torch.Generator().manual_seed(1))
    strided = torch.empty(2, 50, 300, 20).permute(3, 2, 1, 0).copy_(x)
    assert compare([x], [strided]) is None
    strided[-1, -1, -1, -1] += 1
    assert compare([x], [strided]) == -1


def test_integers_are_compared():
    x = torch.arange(100_000)
    changed = x.clone()
    changed[5] += 1
    assert compare([x, x], [x, x.clone()]) is None
    assert compare([x, x], [x, changed]) == 0
    flags = torch.rand(1000) > 0.5
    assert compare([x * 0, flags], [x * 0, ~flags]) == 0


def test_the_mini_batches_that_are_compared():
    digests = Digests()
    seen = []
    for number in range(1, 1100):
        digests.begin()
        if number % 2:  # nothing is recomputed in even ones
            is_compared = [digests.start() is not None for _ in range(3)]
            assert len(set(is_compared)) == 1
            if is_compared[0]:
                seen.append((number + 1) // 2)
    assert seen == [1, 2, 16, 128]
    digests.begin()
    assert digests.stop() is None


@pytest.mark.parametrize("autocast", [False, True])
def test_digests_have_no_graph_and_do_not_depend_on_settings(autocast):
    x = torch.randn(50, 3, requires_grad=True)
    results = []
    default = torch.get_default_dtype()
    for dtype, enabled in itertools.product((torch.float32, torch.float64), (False, autocast)):
        torch.set_default_dtype(dtype)
        try:
            with torch.autocast("cpu", enabled=enabled), torch.device("meta"):
                digests = Digests()
                digest = digests.start()
                digests.add(0, x * 2)
        finally:
            torch.set_default_dtype(default)
        assert digest is not None
        sums = digest[0][1][0].sums
        assert sums is not None
        assert not sums.requires_grad
        results.append(sums.tolist())
    assert all(sums == results[0] for sums in results)
