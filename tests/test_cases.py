"""The few combinations that stand for all, and many cases in one test."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.cases import for_each, pairs


@pytest.mark.parametrize("axes", [(3, 3, 4), (1, 3, 4), (2, 5), (2, 2, 2, 2)], ids=str)
def test_pairs_are_few_combinations_and_have_every_pair(axes):
    found = pairs(*map(range, axes))

    for first, second in combinations(range(len(axes)), 2):
        wanted = set(product(range(axes[first]), range(axes[second])))
        assert {(case[first], case[second]) for case in found} == wanted
    assert len(found) == len(set(found)) <= prod(axes)
    assert len(axes) < 3 or 1 in axes or len(found) <= prod(axes) * 2 / 3


def test_a_failure_names_its_case():
    ran = []

    @for_each("a", [1, 2, 3], lambda a: f"a={a}")
    @for_each("b", "xy")
    def run(a, b, c):
        ran.append((a, b, c))
        assert (a, b) != (2, "y")

    with pytest.raises(AssertionError) as caught:
        run(c=0)

    assert ran == [(1, "x", 0), (1, "y", 0), (2, "x", 0), (2, "y", 0)]
    assert caught.value.__notes__ == ["in the case {'b': 'y'}", "in the case a=2, {'a': 2}"]
