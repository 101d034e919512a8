"""Dividing costs: small examples, errors, and every small case compared with brute force."""

from __future__ import annotations

import random
import time
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.errors import BalanceError
from procpipe.planner.divide import divide
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
    assert divide(costs, num_partitions) == expected


def test_what_cannot_be_divided_is_refused():
    for num_layers, num_partitions, message in (
        (3, 0, "cannot divide 3 layers into 0 partitions: ask for at least 1"),
        (1, 2, "cannot divide 1 layer into 2 partitions, .* at most 1 "),
    ):
        with pytest.raises(BalanceError, match=message):
            divide([1.0] * num_layers, num_partitions)


def test_all_invalid_costs_are_listed():
    with pytest.raises(
        ValueError, match="cost -2 of layer 1, cost nan of layer 2, cost inf of layer 4: give each"
    ):
        divide([1, -2, float("nan"), 3, float("inf")], 2)


costs = st.one_of(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=8),
    st.lists(st.sampled_from([0, 0, 1, 0.125, 0.5, 20]), min_size=1, max_size=9),
)


@given(costs=costs, data=st.data())
def test_divisions_equal_those_of_brute_force(costs, data):
    num_partitions = data.draw(st.integers(1, len(costs)))

    assert divide(costs, num_partitions) == best_of_all(costs, num_partitions)


@given(costs=st.lists(st.floats(0, 1e12), min_size=1, max_size=8), data=st.data())
def test_of_any_costs_no_division_is_better(costs, data):
    num_partitions = data.draw(st.integers(1, len(costs)))

    def quality(parts):
        cuts = [0, *accumulate(parts)]
        sums = [sum(map(Fraction, costs[i:j])) for i, j in pairwise(cuts)]
        return max(sums), sum(s * s for s in sums)

    most, squares = quality(divide(costs, num_partitions))
    least, fewest = quality(best_of_all(costs, num_partitions))
    whole = sum(map(Fraction, costs))
    assert most <= least + whole / 10**10
    assert squares <= fewest + whole * whole / 10**10


@pytest.mark.slow
def test_a_thousand_layers_are_divided_in_seconds():
    numbers = random.Random(0)
    costs = [numbers.random() for _ in range(1_000)]
    costs[500] = 1_000.0  # so that nearly every cut is within reach of every part

    begun = time.process_time()
    parts = divide(costs, 8)

    assert time.process_time() - begun < 20  # it takes 1 s; all divisions, for ever
    assert (len(parts), sum(parts)) == (8, 1_000)


def best_of_all(costs, num_partitions):
    """Return the best of all divisions, by the definition."""
    exact = [Fraction(cost) for cost in costs]
    inner = combinations(range(1, len(costs)), num_partitions - 1)
    divisions = [[0, *cuts, len(costs)] for cuts in inner]

    def quality(cuts):
        sums = [sum(exact[i:j]) for i, j in pairwise(cuts)]
        return max(sums), sum(s * s for s in sums), cuts[::-1]

    return [j - i for i, j in pairwise(min(divisions, key=quality))]
