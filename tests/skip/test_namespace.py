"""Namespaces differ from each other, and equal their copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from procpipe.skip import Namespace
from procpipe.skip.namespace import SkipKey


def test_two_namespaces_differ() -> None:
    assert Namespace() != Namespace()
    assert len({Namespace() for _ in range(10)}) == 10


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda namespace: pickle.loads(pickle.dumps(namespace))]
)
def test_a_copy_is_the_same_namespace(duplicate: Callable[[Namespace], Namespace]) -> None:
    namespace = Namespace()
    again = duplicate(namespace)
    assert again == namespace
    assert hash(again) == hash(namespace)
    assert SkipKey(again, "a") in {SkipKey(namespace, "a"): 0}


def test_the_repr_distinguishes_namespaces() -> None:
    first, second = Namespace(), Namespace()
    assert repr(first) == repr(copy.deepcopy(first)) != repr(second)
    assert repr(first).startswith("<Namespace ")


def test_the_text_of_a_key_names_its_namespace_if_it_has_one() -> None:
    namespace = Namespace()
    assert str(SkipKey(None, "a")) == "'a'"
    assert str(SkipKey(namespace, "a")) == f"'a' in {namespace!r}"
