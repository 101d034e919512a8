"""Nested values are flattened and rebuilt, also through JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from procpipe.errors import BoundaryError
from procpipe.tree import Flat, flatten, in_words, map_tensors, unflatten
from tests.cases import for_each


class Pair(NamedTuple):
    x: Any
    y: Any


class Unnamed(NamedTuple):
    x: Any


@dataclasses.dataclass
class Output:
    loss: Any = None
    hidden: Any = None


class Registered:
    def __init__(self, a: Any, b: Any, scale: Any) -> None:
        self.a, self.b, self.scale = a, b, scale


class Encoding(collections.UserDict):
    """Like Hugging Face's BatchEncoding: not registered."""


@dataclasses.dataclass
class NotRegistered:
    x: Any = 1


class Unnameable:
    pass


pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")
pytree.register_dataclass(Output, serialized_type_name="tests.Output")
pytree.register_pytree_node(
    Registered,
    lambda value: ([value.a, value.b], value.scale),
    lambda parts, scale: Registered(*cast("tuple[Any, Any]", parts), scale),
    serialized_type_name="tests.Registered",
)
pytree.register_pytree_node(Unnameable, lambda u: ([], u), lambda _, u: u)

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["*", "[]", "null"])
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
            | st.tuples(children, children).map(lambda pair: Pair(*pair))
        ),
        max_leaves=12,
    )


TENSORS = st.integers(0, 9).map(lambda number: torch.tensor(float(number)))


def is_same(a: Any, b: Any) -> bool:
    """Compare types, order of keys, and the identity of tensors."""
    if isinstance(a, Tensor) or type(a) is not type(b):
        return a is b
    if isinstance(a, (tuple, list, collections.deque)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            is_same(a[key], b[key]) for key in a
        )
    if isinstance(a, (Output, Registered)):
        return is_same(vars(a), vars(b))
    return bool(a == b) and repr(a) == repr(b)


@given(nested(PLAIN | TENSORS))
def test_round_trip_through_json(value):
    tensors, structure = flatten(value)
    through = tuple(json.loads(json.dumps(structure)))
    assert through == structure
    hash(structure)
    assert is_same(unflatten(tensors, through), value)


@given(nested(PLAIN | TENSORS), nested(PLAIN | TENSORS))
def test_structures_differ_where_values_are_built_differently(first, second):
    def skeleton(value):
        return repr(map_tensors(lambda tensor: "a tensor", value))

    has_same_structure = flatten(first)[1] == flatten(second)[1]
    assert has_same_structure == (skeleton(first) == skeleton(second))


def defaults():
    value: Any = collections.defaultdict(list, {"a": torch.ones(2)})
    value[1] = [torch.zeros(2)]
    return value


@for_each(
    "value",
    [
        Pair(torch.ones(2), [torch.zeros(2), None]),
        Output(torch.ones(()), (torch.zeros(2), 1)),
        {"k": [Output(hidden=Pair(Pair(torch.ones(2), "s"), -0.0))]},
        collections.OrderedDict(b=torch.ones(2), a=torch.zeros(2)),
        defaults(),
        Registered(torch.ones(2), None, [0.5, "x"]),
        collections.deque([torch.ones(2)], maxlen=3),
    ],
)
def test_a_container_keeps_its_class(value):
    assert is_same(unflatten(*flatten(value)), value)
    if isinstance(value, collections.defaultdict):
        assert unflatten(*flatten(value))["new"] == []


@for_each("value", [math.inf, -math.inf, math.nan, -0.0, 2**100, "\ud800", 5e-324])
def test_unusual_plain_values_survive_json(value):
    assert repr(unflatten([], flatten([value])[1])) == repr([value])


@for_each(
    ("value", "message"),
    [
        ({1, 2}, "a value of type builtins.set cannot travel between stages.*: use tensors, None"),
        ([0, {"k": (1, object())}], r"type builtins\.object at \[1\]\['k'\]\[1\] cannot travel"),
        ((torch.ones(1), 1j), r"type builtins\.complex at \[1\] cannot travel"),
        (Pair(1, {2}), r"type builtins\.set at \.y cannot travel"),
        ([Output(hidden=[{1}])], r"type builtins\.set at \[0\]\.hidden\[0\] cannot travel"),
        (
            collections.OrderedDict({(1,): 1}),
            r"\[\(1,\)\].* cannot travel.*keys of type str or",
        ),
        (torch.float32, r"type torch\.dtype cannot travel"),
        (NotRegistered(), r"NotRegistered cannot travel .* by register_dataclass\("),
        ((Encoding({}),), r"Encoding at \[0\] cannot travel .* give dict\("),
        (Unnamed(1), r"Unnamed.* cannot travel.* _register_namedtuple\("),
        (Unnameable(), r"(?s)Unnameable.* cannot travel"),
        (Registered(1, 2, (3,)), r"its context or its keys change when they are written as JSON"),
        (collections.defaultdict(lambda: 0), r"<lambda>.* cannot travel"),
    ],
)
def test_other_types_are_refused_and_placed(value, message):
    with pytest.raises(BoundaryError, match=message):
        flatten(value)


@for_each("name", ["tests.Missing", "subprocess.Popen", "torch.Tensor"])
def test_a_class_that_is_not_registered_here_is_not_rebuilt(name):
    containers, leaves = flatten(Registered(1, 2, None))[1]
    with pytest.raises(BoundaryError, match=f"(?s){name}.*on every rank"):
        unflatten([], (containers.replace("tests.Registered", name), leaves))


def test_flat_takes_tensors_out_of_their_graph():
    weight = nn.Parameter(torch.ones(2))
    flat = Flat.of((weight, weight.detach(), weight * 2, 7))
    assert flat.requires_grad == (True, False, True)
    assert not any(tensor.requires_grad for tensor in flat.tensors)
    assert flat.tensors[0].data_ptr() == weight.data_ptr()
    first, second, third, seven = flat.value
    assert [t.tolist() for t in (first, second, third)] == [[1, 1], [1, 1], [2, 2]]
    assert seven == 7


def test_values_as_text():
    text = in_words([Output(torch.ones(2), Pair(1, None)), Encoding()])
    assert text == "[Output(loss=float32 (2,), hidden=Pair(x=1, y=None)), Encoding]"
    assert in_words("a") == "'a'"
