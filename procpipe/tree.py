"""Nested values as a list of tensors and a structure, by torch's pytree.

What may be nested is what ``torch.utils._pytree`` opens: tuples, lists, dicts, ``OrderedDict``,
``defaultdict``, ``deque``, and classes that are registered there with a name. Every leaf must be a
tensor or a plain value of JSON. Anything else would hide its tensors: it would reach each
micro-batch whole, or not reach another process. So it is an error, on one stage, too.

    value                       structure: the containers, and the leaves that are no tensors
    tensor                      ("*", "")
    (a, [b], 0.5)               ('[1, {"type": "builtins.tuple", …}]', "[[], [], 0.5]")

A structure is text, so that it can be compared exactly (``1``, ``True`` and ``1.0`` differ), hashed
and sent. Nothing from the network is unpickled: a class is sent by its registered name.

A leaf: every part of procpipe may use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from procpipe.errors import BoundaryError
from procpipe.torch_internals import pytree

PLAIN_TYPES = (bool, int, float, str, type(None))

#: The containers as ``treespec_dumps`` writes them, then a JSON list of the leaves, in which ``[]``
#: is a tensor; "" if all are.
Structure = tuple[str, str]

TENSOR: Structure = ("*", "")

_USABLE = (
    "use tensors, None, bool, int, float and str in tuples, lists, dicts with keys of type str or "
    "int, and classes that have a name in torch.utils._pytree, by register_dataclass(Class, "
    "serialized_type_name='Class'), _register_namedtuple(Class, serialized_type_name='Class') or "
    "register_pytree_node(Class, flatten, unflatten, serialized_type_name='Class') where the class "
    "is defined; of another Mapping, give dict(mapping)"
)


class Flat(NamedTuple):
    """A nested value taken apart, as it enters or leaves a partition and as a channel carries it.

    Attributes:
        tensors: detached tensors, from left to right.
        structure: everything else.
        requires_grad: for each tensor, whether a gradient is to be sent back.
    """

    tensors: list[Tensor]
    structure: Structure
    requires_grad: tuple[bool, ...]

    @property
    def value(self) -> Any:
        """The nested value."""
        return unflatten(self.tensors, self.structure)

    @classmethod
    def of(cls, value: Any) -> Flat:
        """Take a nested value apart, and detach its tensors."""
        tensors, structure = flatten(value)
        flags = tuple(tensor.requires_grad for tensor in tensors)
        return cls([tensor.detach() for tensor in tensors], structure, flags)


def flatten(value: Any, where: str = "") -> tuple[list[Tensor], Structure]:
    """Take a nested value apart into its tensors, from left to right, and its structure.

    Raises:
        BoundaryError: the value, which ``where`` names, holds an object that is neither a tensor
            nor a plain value, or a container that another process could not rebuild.
    """
    if isinstance(value, Tensor):
        return [value], TENSOR
    if type(value) is tuple and all(isinstance(each, Tensor) for each in value):
        return list(value), _tuple_of_tensors(len(value))  # sooner: all messages of gradients
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = ""
    if len(tensors) < len(leaves):
        check_leaves(value, leaves, where)
        plain = json.dumps([[] if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return tensors, (text_of(spec), plain)


def unflatten(tensors: Iterable[Any], structure: Structure) -> Any:
    """Reverse :func:`flatten`; ``tensors`` may be any objects.

    Raises:
        BoundaryError: the class of a container is not registered in this process.
    """
    if structure == TENSOR:
        (only,) = tensors
        return only
    text, plain = structure
    leaves = list(tensors)
    if structure == _tuple_of_tensors(len(leaves)):
        return tuple(leaves)
    if plain:
        remaining = iter(leaves)
        leaves = [next(remaining) if leaf == [] else leaf for leaf in json.loads(plain)]
        assert next(remaining, None) is None, "more tensors than the structure has places"
    return pytree.tree_unflatten(leaves, _spec_of(text))


def map_tensors(function: Callable[[Tensor], Any], value: Any, where: str = "") -> Any:
    """Return the same nested value with ``function(tensor)`` in the place of each tensor."""
    tensors, structure = flatten(value, where)
    return unflatten([function(tensor) for tensor in tensors], structure)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is no more than its elements, and so arrives as it was sent.

    A quantized or nested tensor, or one of another class (``MaskedTensor``, ``DTensor``, a user's
    own), would arrive without what its class adds. A parameter may travel, and arrives as a tensor.
    """
    is_known = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return is_known and not tensor.is_quantized and not tensor.is_nested


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is plain and has memory for all its elements, unlike a sparse one."""
    return is_plain(tensor) and tensor.layout == torch.strided and not tensor.is_meta


def versions_of(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return of each tensor what rises when it is changed in place; None for inference tensors."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def check_leaves(
    value: Any, leaves: Iterable[Any], where: str = "", others: tuple[type, ...] = ()
) -> None:
    """Check that each leaf of a value is a tensor, a plain value, or of one of the other types.

    ``where`` names the value, for errors.

    Raises:
        BoundaryError: one is not.
    """
    for k, leaf in enumerate(leaves):
        cls = type(leaf)
        if not isinstance(leaf, Tensor) and cls not in PLAIN_TYPES and cls not in others:
            place = where + place_of(value, k)
            raise BoundaryError(
                f"a value of type {cls.__module__}.{cls.__qualname__}{place and f' at {place}'} "
                f"cannot travel between stages, nor be divided over micro-batches: {_USABLE}"
            )


def place_of(value: Any, number: int) -> str:
    """Return where a leaf is, in Python's notation: ``[0].hidden``; "" if its class cannot say."""
    try:
        return pytree.keystr(pytree.tree_flatten_with_path(value)[0][number][0])
    except ValueError:
        return ""


def in_words(value: Any) -> str:
    """Describe a nested value by its tensors, for errors: "(float32 (4, 3), None)"."""
    return repr(pytree.tree_map(_leaf_in_words, value))


def _leaf_in_words(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _Unquoted(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}")
    return leaf if isinstance(leaf, PLAIN_TYPES) else _Unquoted(type(leaf).__name__)


class _Unquoted(str):
    __slots__ = ()
    __repr__ = str.__str__


@lru_cache(maxsize=64)
def _tuple_of_tensors(number: int) -> Structure:
    return text_of(pytree.tree_structure((0,) * number)), ""


@lru_cache(maxsize=512)
def text_of(spec: pytree.TreeSpec) -> str:
    """Return the containers of a value as text.

    Raises:
        BoundaryError: what is read from the text would differ, or a class has no name.
    """
    try:
        text = pytree.treespec_dumps(spec)
        if pytree.treespec_loads(text) != spec:
            raise ValueError("its context or its keys change when they are written as JSON")
    except Exception as error:
        raise BoundaryError(
            f"a value of the form {' '.join(str(spec).split())} cannot travel between stages: "
            f"{error}: {_USABLE}"
        ) from error
    return text


@lru_cache(maxsize=512)
def _spec_of(text: str) -> pytree.TreeSpec:
    try:
        return pytree.treespec_loads(text)
    except Exception as error:
        raise BoundaryError(
            f"a value of the form {text} came from another rank, but cannot be rebuilt here: "
            f"{error} Import the module that registers the class on every rank"
        ) from error
