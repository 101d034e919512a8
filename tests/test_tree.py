"""Nested values are flattened and rebuilt, also through JSON."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from procpipe.errors import BoundaryError
from procpipe.tree import Flat, flatten, from_json, map_tensors, unflatten
from tests.cases import for_each

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["*", "v", "t", "l", "d"])
)


def nested(leaves):
    keys = st.text(max_size=3) | st.integers(-3, 3)
    return st.recursive(
        leaves,
        lambda children: (
            st.lists(children, max_size=3)
            | st.lists(children, max_size=3).map(tuple)
            | st.dictionaries(keys, children, max_size=3)
            | st.dictionaries(keys, children, max_size=3).map(collections.OrderedDict)
            | st.tuples(children, children).map(lambda pair: Point(*pair))
        ),
        max_leaves=12,
    )


Point = collections.namedtuple("Point", "x y")
TENSORS = st.integers(0, 9).map(lambda number: torch.tensor(float(number)))


def is_same(a: Any, b: Any) -> bool:
    """Compare types, order of keys, and the identity of tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            is_same(a[key], b[key]) for key in a
        )
    return bool(a == b) and repr(a) == repr(b)


@given(nested(PLAIN | TENSORS))
def test_round_trip(value):
    tensors, structure = flatten(value)
    assert is_same(unflatten(tensors, structure), value)
    hash(structure)


@given(nested(PLAIN | TENSORS))
def test_round_trip_through_json(value):
    tensors, structure = flatten(value)
    through = from_json(json.loads(json.dumps(structure)))
    assert through == structure
    assert repr(through) == repr(structure)
    assert is_same(unflatten(tensors, through), value)


@given(nested(PLAIN | TENSORS), nested(PLAIN | TENSORS))
def test_structures_differ_where_values_are_built_differently(first, second):
    def skeleton(value):
        return repr(map_tensors(lambda tensor: "a tensor", value))

    has_same_structure = repr(flatten(first)[1]) == repr(flatten(second)[1])
    assert has_same_structure == (skeleton(first) == skeleton(second))


def test_a_literal_structure():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    value = (a, [None, {"k": b, 2: 0.5}], "*", (), c)
    tensors, structure = flatten(value)
    assert [id(tensor) for tensor in tensors] == [id(a), id(b), id(c)]
    assert structure == (
        "t",
        (
            "*",
            ("l", (("v", None), ("d", ("*", ("v", 0.5)), "k", 2))),
            ("v", "*"),
            ("t", ()),
            "*",
        ),
    )
    assert flatten(a) == ([a], "*")
    assert flatten("*") == ([], ("v", "*"))


@for_each("value", [math.inf, -math.inf, math.nan, -0.0, 2**100, "\ud800", 5e-324])
def test_unusual_plain_values_survive_json(value):
    structure = from_json(json.loads(json.dumps(flatten([value])[1])))
    assert repr(unflatten([], structure)) == repr([value])


@for_each(
    ("value", "message"),
    [
        ({1, 2}, "a value of type builtins.set cannot travel between stages: use tensors, None"),
        ([0, {"k": (1, object())}], r"type builtins\.object at \[1\]\['k'\]\[1\] cannot travel"),
        ((torch.ones(1), 1j), r"type builtins\.complex at \[1\] cannot travel"),
        (Point(1, {2}), r"type builtins\.set at \[1\] cannot travel"),
        (collections.OrderedDict({2.5: 1}), r"a dict key of type float cannot travel"),
        ([{2.5: 1}], r"a dict key of type float at \[0\] cannot travel.*use str or int keys"),
        ({True: 1}, r"a dict key of type bool cannot travel"),
        (torch.float32, r"type torch\.dtype cannot travel"),
    ],
)
def test_other_types_are_refused_and_placed(value, message):
    with pytest.raises(BoundaryError, match=message):
        flatten(value)


def test_map_tensors():
    value = {"a": [torch.ones(2), 3], "b": None}
    assert map_tensors(len, value) == {"a": [2, 3], "b": None}
    assert map_tensors(len, torch.ones(4)) == 4
    assert map_tensors(len, "no tensor") == "no tensor"


def test_flat_takes_tensors_out_of_their_graph():
    weight = nn.Parameter(torch.ones(2))
    flat = Flat.of((weight, weight.detach(), weight * 2, 7))
    assert flat.requires_grad == (True, False, True)
    assert not any(tensor.requires_grad for tensor in flat.tensors)
    assert flat.tensors[0].data_ptr() == weight.data_ptr()
    first, second, third, seven = flat.value
    assert [t.tolist() for t in (first, second, third)] == [[1, 1], [1, 1], [2, 2]]
    assert seven == 7


def test_a_structure_that_does_not_fit_is_an_assertion_error():
    _, structure = flatten((torch.ones(1), torch.ones(1)))
    with pytest.raises(AssertionError, match="more tensors than the structure has places"):
        unflatten([1, 2, 3], structure)
