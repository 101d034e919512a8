"""Containers of the user's own classes keep their class on every path through a pipeline."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys
import types
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from procpipe.containers import built, opened
from procpipe.data.microbatch import NoChunk, gather, scatter
from procpipe.errors import BoundaryError
from procpipe.tree import flatten, from_json, in_words, unflatten
from tests.cases import for_each

T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    held: T


class Recorded(type):
    """A metaclass that records the attributes that are read from its classes."""

    names: list[str] = []  # noqa: RUF012 - of all its classes

    def __getattr__(cls, name: str) -> Any:
        Recorded.names.append(name)
        raise AttributeError(name)


class Guarded(metaclass=Recorded):
    pass


class Pair(NamedTuple):
    x: Any
    y: Any


class Marked(Pair):
    """A named tuple with attributes besides."""


@dataclasses.dataclass
class Output:
    loss: Any = None
    hidden: Any = None
    total: Any = dataclasses.field(init=False, default=None)

    num_made = 0

    def __post_init__(self):
        type(self).num_made += 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: Any
    y: Any = 3


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """Like Hugging Face's class: each field that is not None is an item, too."""

    loss: Any = None
    logits: Any = None
    hidden_states: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name, value):
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


class Encoding(collections.UserDict):
    """Like Hugging Face's BatchEncoding."""

    def __init__(self, data, num_sequences):
        super().__init__(data)
        self.num_sequences = num_sequences


class Lookup(Mapping):
    __slots__ = ("values_",)

    def __init__(self, values):
        self.values_ = values

    def __getitem__(self, key):
        return self.values_[key]

    def __iter__(self):
        return iter(self.values_)

    def __len__(self):
        return len(self.values_)


class Registered:
    def __init__(self, a: Any, b: Any, scale: Any) -> None:
        self.a, self.b, self.scale = a, b, scale


pytree.register_pytree_node(
    Registered,
    lambda value: ([value.a, value.b], value.scale),
    lambda parts, scale: Registered(*cast("tuple[Any, Any]", parts), scale),
)


@dataclasses.dataclass
class RegisteredData:
    x: Any
    y: Any = None


pytree.register_dataclass(RegisteredData)


class Unnameable:
    pass


pytree.register_pytree_node(Unnameable, lambda u: ([], u), lambda _, u: u)


@dataclasses.dataclass
class Deleter:
    path: Any = ""

    def __del__(self):
        os.environ["PROCPIPE_DELETED"] = self.path


def marked() -> Any:
    value: Any = Marked(torch.ones(2), 1)
    value.note = "here"
    return value


def defaults():
    value: Any = collections.defaultdict(list, {"a": torch.ones(2)})
    value[1] = [torch.zeros(2)]
    return value


VALUES = {
    "named tuple": lambda: Pair(torch.ones(2), [torch.zeros(2), None]),
    "named tuple with attributes": marked,
    "dataclass": lambda: Output(torch.ones(()), (torch.zeros(2), 1)),
    "frozen dataclass with slots": lambda: Frozen(x=torch.ones(2)),
    "nested": lambda: {"k": [Output(Frozen(x=Pair(torch.ones(2), "s")))]},
    "OrderedDict": lambda: collections.OrderedDict(b=torch.ones(2), a=torch.zeros(2)),
    "defaultdict": defaults,
    "Counter": lambda: collections.Counter("abca"),
    "ModelOutput": lambda: ModelOutput(logits=torch.ones(2), loss=torch.ones(())),
    "UserDict": lambda: Encoding({"ids": torch.ones(2)}, 2),
    "Mapping with slots": lambda: Lookup({"ids": torch.ones(2)}),
    "registered": lambda: Registered(torch.ones(2), None, (0.5, "x")),
    "registered dataclass": lambda: RegisteredData(torch.ones(2)),
    "torch.Size": lambda: torch.ones(2, 3).shape,
    "torch.return_types": lambda: torch.ones(2, 3).max(0),
    "deque": lambda: collections.deque([torch.ones(2)], maxlen=3),
}


def attributes(value: Any) -> dict[str, Any]:
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    return {name: getattr(value, name) for name in names}


def is_same(a: Any, b: Any) -> bool:
    """Compare classes, attributes, order of keys, and the identity of tensors."""
    if isinstance(a, Tensor) or type(a) is not type(b):
        return a is b
    if isinstance(a, dict) and not all(map(is_same, dict.items(a), dict.items(b))):
        return False
    if isinstance(a, (tuple, list, collections.deque)) and not all(map(is_same, a, b)):
        return False
    ours, theirs = attributes(a), attributes(b)
    if ours or isinstance(a, (dict, tuple, list, collections.deque)):
        return list(ours) == list(theirs) and all(is_same(ours[k], theirs[k]) for k in ours)
    return bool(a == b)


@for_each("make", VALUES.values(), ids=VALUES)
def test_a_container_keeps_its_class_through_json(make):
    value = make()
    tensors, structure = flatten(value)
    through = from_json(json.loads(json.dumps(structure)))
    assert through == structure
    hash(structure)
    assert is_same(unflatten(tensors, through), value)


def test_a_tensor_that_is_item_and_attribute_is_sent_once():
    value = VALUES["ModelOutput"]()
    tensors, structure = flatten(value)
    assert len(tensors) == 2
    back = unflatten(tensors, structure)
    assert back.logits is back["logits"] is value.logits
    assert back.hidden_states is None
    assert "hidden_states" not in back


def test_no_code_of_a_class_runs_to_rebuild_it():
    flat = flatten(Output(torch.ones(2)))
    made_before = Output.num_made
    unflatten(*flat)
    assert Output.num_made == made_before


def test_no_code_of_a_metaclass_is_run():
    Recorded.names.clear()
    with pytest.raises(BoundaryError, match="this one has no such"):
        built(f"{__name__}:Guarded", ((), (), (), ""), [])
    assert Recorded.names == []


def test_a_generic_dataclass_of_a_named_type_is_sent():
    tensors, structure = flatten(Box[Tensor](torch.ones(2)))
    rebuilt = unflatten(tensors, from_json(json.loads(json.dumps(structure))))
    assert type(rebuilt) is Box
    assert rebuilt.held is tensors[0]


def test_a_defaultdict_keeps_its_factory():
    back = unflatten(*flatten(defaults()))
    assert back["new"] == []


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        x: Any = 1

    return Local()


@for_each(
    ("value", "message"),
    [
        (local_class(), r"Local cannot travel .* define it at the module's top level"),
        ([Output(hidden=[{1}])], r"type builtins\.set at \[0\]\.hidden\[0\] cannot travel"),
        (Deleter(), r"type .*Deleter cannot travel"),
        (Unnameable(), r"Unnameable cannot travel .* context .* to_dumpable_context"),
        (types.MappingProxyType({}), r"type builtins\.mappingproxy cannot travel"),
        (os.environ, r"builtins\.function at \.encodekey cannot travel"),
        (collections.defaultdict(lambda: 0), r"function at \.default_factory cannot travel"),
        (Encoding({torch.float32: 1}, 1), r"key of type dtype at \.data cannot travel"),
    ],
)
def test_a_value_that_cannot_be_rebuilt_is_refused_by_its_sender(value, message):
    with pytest.raises(BoundaryError, match=message):
        flatten(value)


FORM = ((), (), (), "")


@for_each(
    ("name", "form", "children"),
    [
        ("subprocess:Popen", FORM, []),
        ("os:system", FORM, []),
        ("antigravity:anything", FORM, []),
        ("torch:Tensor", FORM, []),
        ("builtins:mappingproxy", FORM, []),
        ("builtins:object", FORM, []),
        (f"{__name__}:Deleter", ((), ("path",), (), ""), ["x"]),
        (f"{__name__}:os.PathLike", FORM, []),
        (f"{__name__}:nothing", FORM, []),
        (f"{__name__}:Output.__class__", FORM, []),
        (f"{__name__}:Frozen", ((), ("z",), (), ""), [1]),
        (f"{__name__}:Output", ((), ("loss",), (), ""), []),
        (f"{__name__}:Output", ("a",), []),
        (f"{__name__}:Output", "__import__('antigravity')", []),
        (f"{__name__}:Registered", "__import__('antigravity')", [1, 2]),
        ("collections:defaultdict", ((), (), (), "eval"), []),
        ("", FORM, []),
        (":", FORM, []),
    ],
)
def test_names_that_a_message_may_not_have_are_refused(name, form, children):
    with pytest.raises(BoundaryError, match=r"came from another rank|cannot be put together"):
        built(name, form, children)
    assert "antigravity" not in sys.modules
    assert "PROCPIPE_DELETED" not in os.environ


def test_micro_batches_have_the_class_of_the_mini_batch():
    table = torch.ones(5)
    value = Output(Encoding({"ids": torch.arange(4)}, 1), Pair(torch.ones(4, 2), NoChunk(table)))
    parts, sizes = scatter((value,), 2)
    assert sizes == [2, 2]
    ((second,), (first,)) = parts[1], parts[0]
    assert isinstance(second, Output)
    assert isinstance(second.loss, Encoding)
    assert first.loss["ids"].tolist() == [0, 1]
    assert second.loss["ids"].tolist() == [2, 3]
    assert second.hidden.y is table


def test_outputs_of_micro_batches_are_joined_in_their_class():
    outputs = [ModelOutput(logits=torch.full((2, 1), i), loss=torch.tensor(i)) for i in range(3)]
    whole = gather(outputs)
    assert type(whole) is ModelOutput
    assert whole.logits.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert whole["loss"] is whole.loss
    assert whole.loss.tolist() == [0, 1, 2]
    assert whole.hidden_states is None


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            [ModelOutput(logits=torch.ones(2)), ModelOutput(logits=torch.ones(2), loss=1)],
            r"with .*\['logits'\].* in micro-batch 0 but .*\['loss'\]",
        ),
        ([Pair(1, 2), (1, 2)], r"Pair with \[0\], \[1\] in micro-batch 0 but a tuple of 2"),
        (
            [Registered(torch.ones(1), torch.ones(1), 1), Registered(torch.ones(1), None, 2)],
            r"context 1\) in micro-batch 0 but .*context 2\)",
        ),
    ],
)
def test_outputs_built_differently(outputs, message):
    with pytest.raises(ValueError, match=message):
        gather(outputs)


def test_containers_as_text():
    text = in_words([Output(torch.ones(2), Pair(1, None)), local_class()])
    assert text == "[Output(.loss: float32 (2,), .hidden: Pair([0]: 1, [1]: None)), Local]"


def test_other_values_than_containers_are_not_opened():
    assert opened({1}) is None
    assert opened(Output) is None
