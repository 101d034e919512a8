"""The few combinations that stand for all."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.cases import pairs


@pytest.mark.parametrize("axes", [(3, 3, 4), (1, 3, 4), (2, 5), (2, 2, 2, 2)], ids=str)
def test_pairs_are_few_combinations_and_have_every_pair(axes):
    found = pairs(*map(range, axes))

    for first, second in combinations(range(len(axes)), 2):
        wanted = set(product(range(axes[first]), range(axes[second])))
        assert {(case[first], case[second]) for case in found} == wanted
    assert len(found) == len(set(found)) <= prod(axes)
    assert len(axes) < 3 or 1 in axes or len(found) <= prod(axes) * 2 / 3


def test_pairs_are_of_the_values():
    assert pairs("ab", [None]) == [("a", None), ("b", None)]
    assert pairs("ab") == [("a",), ("b",)]
