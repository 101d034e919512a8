"""Nested values (tuples, lists, dicts and other containers of tensors) as a list and a structure.

A structure consists of plain tuples, strings and numbers, so that it can be compared, hashed and
sent as JSON. ``torch.utils._pytree`` has classes in its structures, which only pickle can carry,
and nothing from the network is unpickled: a class is sent by its name.

    value                          structure
    tensor                         "*"
    None, bool, int, float, str    ("v", value)
    (a, b)                         ("t", (…, …))
    [a, b]                         ("l", (…, …))
    {"k": a}                       ("d", (…, …), "k", …)       in the dict's own order
    any other container            ("module:class", (…, …), *form)    see ``containers``

A leaf: every part of procpipe may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from procpipe.containers import USABLE, built, check_keys, opened
from procpipe.errors import BoundaryError

T = TypeVar("T")

PLAIN_TYPES = (bool, int, float, str, type(None))

#: See the table above. ``Any`` because a recursive type would say no more.
Structure = Any

TENSOR = "*"


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


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Take a nested value apart into its tensors, from left to right, and its structure.

    Args:
        value: a tensor, ``None``, a plain ``bool``, ``int``, ``float`` or ``str``, or a tuple,
            list, dict (keys ``str`` or ``int``) or other container of such values, to any depth;
            ``containers`` lists which classes these are.

    Raises:
        BoundaryError: the value holds an object of another type, or a container whose class has
            no name by which another process would find it.
    """
    if isinstance(value, Tensor):
        return [value], TENSOR
    tensors: list[Tensor] = []
    return tensors, _take_apart(value, tensors, "")


def unflatten(tensors: Iterable[Any], structure: Structure) -> Any:
    """Reverse :func:`flatten`; ``tensors`` may be any objects.

    Raises:
        BoundaryError: this process lacks the class of a container.
    """
    if structure == TENSOR:
        (only,) = tensors
        return only
    remaining = iter(tensors)
    value = _put_together(remaining, structure)
    assert next(remaining, None) is None, "more tensors than the structure has places"
    return value


def joined(parts: Sequence[Flat]) -> Flat:
    """Join several values as a tuple; a single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return Flat(
        [tensor for part in parts for tensor in part.tensors],
        ("t", tuple(part.structure for part in parts)),
        tuple(flag for part in parts for flag in part.requires_grad),
    )


def parted(whole: Flat, num_values: int) -> list[Flat]:
    """Reverse :func:`joined`."""
    if num_values == 1:
        return [whole]
    structures = whole.structure[1]
    sizes = [num_tensors(structure) for structure in structures]
    pieces = zip(
        cut(whole.tensors, sizes), structures, cut(whole.requires_grad, sizes), strict=True
    )
    return [Flat(tensors, structure, tuple(flags)) for tensors, structure, flags in pieces]


def cut(items: Sequence[T], sizes: Iterable[int]) -> list[list[T]]:
    """Cut a sequence into consecutive lists of these sizes, which add up to its length."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(list(items[start : start + size]))
        start += size
    assert start == len(items), "the pieces are not the whole"
    return pieces


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the same nested value with ``function(tensor)`` in the place of each tensor."""
    tensors, structure = flatten(value)
    return unflatten([function(tensor) for tensor in tensors], structure)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is no more than its elements, and so arrives as it was sent.

    A quantized or nested tensor, or one of another class (``MaskedTensor``, ``DTensor``, a user's
    own), would arrive without what its class adds. A parameter may travel, and arrives as a tensor.
    """
    is_known = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return is_known and not tensor.is_quantized and not tensor.is_nested


def children_of(value: Any) -> list[Any]:
    """Return what a tuple, list, dict or other container holds; nothing of any other value."""
    container = opened(value)
    return container.children if container else []


def from_json(decoded: Any) -> Structure:
    """Return the structure that was written as JSON (which has lists, but no tuples)."""
    return tuple(map(from_json, decoded)) if isinstance(decoded, list) else decoded


def _take_apart(value: Any, tensors: list[Tensor], where: str) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if type(value) in PLAIN_TYPES:
        return ("v", value)
    container = opened(value, where)
    at = f" at {where}" if where else ""
    if container is None:
        raise BoundaryError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__}{at} cannot "
            f"travel between stages: use {USABLE}"
        )
    if container.name == "d":
        check_keys(container.form, at)
    pairs = zip(container.labels, container.children, strict=True)
    children = tuple([_take_apart(child, tensors, where + label) for label, child in pairs])
    return (container.name, children, *container.form)


def _put_together(tensors: Iterator[Any], structure: Structure) -> Any:
    if structure == TENSOR:
        return next(tensors)
    name, content, *form = structure
    if name == "v":
        return content
    return built(name, tuple(form), [_put_together(tensors, child) for child in content])


def num_tensors(structure: Structure) -> int:
    """Return how many places for tensors a structure has."""
    if structure == TENSOR:
        return 1
    return 0 if structure[0] == "v" else sum(map(num_tensors, structure[1]))


def in_words(value: Any) -> str:
    """Describe a nested value by its tensors, for errors: "(float32 (4, 3), None)"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    try:
        container = opened(value)
    except BoundaryError:
        container = None
    if container is None:
        return repr(value) if isinstance(value, PLAIN_TYPES) else type(value).__name__
    children = list(map(in_words, container.children))
    if container.name in ("t", "l"):
        inside = ", ".join(children)
        return f"({inside})" if container.name == "t" else f"[{inside}]"
    if container.name == "d":
        pairs = zip(map(repr, container.form), children, strict=True)
        return "{" + ", ".join(map(": ".join, pairs)) + "}"
    pairs = zip(container.labels, children, strict=True)
    return f"{type(value).__name__}({', '.join(map(': '.join, pairs))})"
