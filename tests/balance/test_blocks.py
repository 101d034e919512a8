"""Dividing costs: small examples, errors, and every small case compared with brute force."""

from __future__ import annotations

import random
import time
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.balance.blocks import blocks, check_num_partitions
from procpipe.errors import BalanceError
from procpipe.words import counted
from tests.cases import for_each


@for_each(
    ("costs", "num_partitions", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),  # 10 | 11
        ([1, 2, 3, 4, 5, 6], 3, [3, 2, 1]),  # 6 | 9 | 6
        ([6, 5, 4, 3, 2, 1], 2, [2, 4]),  # 11 | 10
        ([9, 1, 1, 1, 1, 1, 1], 3, [1, 3, 3]),  # 9 | 3 | 3, not 9 | 1 | 5: even beyond the largest
        ([0.5, 0.25, 0.25, 1.0], 2, [3, 1]),
        ([7], 1, [1]),
        ([3, 1, 2], 1, [3]),
        ([3, 1, 2], 3, [1, 1, 1]),
    ],
)
def test_examples(costs, num_partitions, expected):
    assert blocks(costs, num_partitions) == expected


def test_the_smallest_largest_part_comes_before_the_smallest_sum_of_squares():
    # 6 | 2 | 3 has the smaller sum of squares, 49 to 51, but 6 is more than 5.
    assert blocks([1, 5, 2, 3], 3) == [1, 1, 2]  # 1 | 5 | 5
    # Here the most even of all divisions whose cuts are within reach has a part of 13.
    assert blocks([9, 2, 4, 8, 5, 8, 3, 3, 9, 8], 7) == [1, 2, 1, 1, 2, 2, 1]  # at most 12


def test_zeros_leave_no_part_empty():
    assert blocks([0, 0], 2) == [1, 1]
    assert blocks([0.0] * 5, 3) == [1, 1, 3]
    assert blocks([0, 0, 5, 0, 0], 3) == [1, 1, 3]


def test_with_equal_costs_later_parts_have_more_layers():
    assert blocks([1] * 10, 4) == [2, 2, 3, 3]
    assert blocks([1] * 11, 3) == [3, 4, 4]


@pytest.mark.parametrize("num_partitions", [0, -1])
def test_a_non_positive_number_of_parts_is_refused(num_partitions):
    with pytest.raises(
        BalanceError, match=f"divide 3 layers into {num_partitions} partitions: .*at least"
    ):
        blocks([1, 2, 3], num_partitions)


@pytest.mark.parametrize(("num_layers", "num_partitions"), [(0, 1), (1, 2), (3, 5)])
def test_fewer_layers_than_parts_are_refused(num_layers, num_partitions):
    layers, partitions = counted(num_layers, "layer"), counted(num_partitions, "partition")
    message = f"divide {layers} into {partitions}, .* at most {num_layers}"
    with pytest.raises(ValueError, match=message):
        blocks([1.0] * num_layers, num_partitions)
    with pytest.raises(BalanceError, match=message):
        check_num_partitions(num_partitions, num_layers)


def test_all_invalid_costs_are_listed():
    with pytest.raises(
        ValueError, match="cost -2 of layer 1, cost nan of layer 2, cost inf of layer 4: give each"
    ):
        blocks([1, -2, float("nan"), 3, float("inf")], 2)


def test_comparison_is_exact():
    tiny, huge = 2.0**-1000, 2.0**900

    assert blocks([huge, tiny, huge, tiny, tiny], 2) == [2, 3]  # rounded, [1, 4] would be equal
    assert blocks([2**60 + 2, 2**60, 1, 1], 2) == [1, 3]
    assert blocks([2**60, 1, 1, 2**60], 2) == [2, 2]


costs = st.one_of(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.lists(st.integers(0, 10**20), min_size=1, max_size=8),
    st.lists(st.floats(0, 1e12), min_size=1, max_size=8),
    st.lists(st.sampled_from([0, 0, 1, 0.1, 0.3, 20]), min_size=1, max_size=9),
)


@given(costs=costs, data=st.data())
def test_divisions_equal_those_of_brute_force(costs, data):
    num_partitions = data.draw(st.integers(1, len(costs)))

    assert blocks(costs, num_partitions) == best_of_all(costs, num_partitions)


@for_each("seed", range(5))
def test_divisions_into_many_parts_equal_those_of_brute_force(seed):
    numbers = random.Random(seed)
    costs = [numbers.choice([0, 1, 1, 2, 7, numbers.random()]) for _ in range(11)]

    for num_partitions in range(1, 12):
        assert blocks(costs, num_partitions) == best_of_all(costs, num_partitions)


@given(costs=costs, factor=st.sampled_from([2.0**-60, 0.5, 2, 2.0**70]), data=st.data())
def test_the_unit_does_not_matter(costs, factor, data):
    num_partitions = data.draw(st.integers(1, len(costs)))
    scaled: list[Any] = [Fraction(cost) * Fraction(factor) for cost in costs]

    assert blocks(scaled, num_partitions) == blocks(costs, num_partitions)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "random", "one giant"])
def test_ten_thousand_layers_are_divided_in_seconds(kind):
    numbers = random.Random(0)
    costs = [1.0 if kind == "equal" else numbers.random() for _ in range(10_000)]
    num_parts = 64
    if kind == "one giant":
        costs[5_000] = 1_000.0  # so that nearly every cut is within reach of every part
        num_parts = 16

    begun = time.process_time()
    parts = blocks(costs, num_parts)

    assert time.process_time() - begun < 7  # takes 0.02 to 0.7 s; a simple algorithm, 15 minutes
    assert len(parts) == num_parts
    assert sum(parts) == 10_000
    if kind == "equal":
        assert parts == [156] * 48 + [157] * 16


def best_of_all(costs, num_partitions):
    """Return the best of all divisions, by the definition."""
    exact = [Fraction(cost) for cost in costs]
    inner = combinations(range(1, len(costs)), num_partitions - 1)
    divisions = [[0, *cuts, len(costs)] for cuts in inner]

    def quality(cuts):
        sums = [sum(exact[i:j]) for i, j in pairwise(cuts)]
        return max(sums), sum(s * s for s in sums), cuts[::-1]

    return [j - i for i, j in pairwise(min(divisions, key=quality))]
