"""Containers of the user's own classes, taken apart and rebuilt.

    class                                   its children
    registered with torch.utils._pytree     what its registered function returns
    tuple, list, dict                       its entries
    named tuple                             its entries, then its attributes
    dataclass, Mapping (OrderedDict, …)     its items if it is a dict, then its attributes

A container travels as its class's name, a form (plain nested tuples) and its children. The receiver
looks the name up among the modules that it has imported already, and accepts only classes of this
table. Nothing is imported, and no code of the class runs, neither ``__init__`` nor
``__post_init__`` nor ``__setattr__``. Only a registered class is rebuilt by a function, which this
process's own script registered.
"""

from __future__ import annotations

import ast
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch

from procpipe.errors import BoundaryError
from procpipe.torch_internals import pytree

#: What may travel besides plain values, for errors.
USABLE = (
    "tensors, None, bool, int, float and str in tuples, lists, dicts, named tuples, dataclasses, "
    "Mappings and types registered with torch.utils._pytree"
)

#: What a defaultdict may make for a missing key.
_FACTORIES = {cls.__name__: cls for cls in (list, dict, tuple, int, float, str, bool)}

#: Plain nested tuples of str and int, unchanged by a round trip through JSON.
Form = tuple[Any, ...]


class Container(NamedTuple):
    """A container taken apart."""

    name: str  # its class, as ``module:qualified name``; "t", "l" and "d" for the built-in ones
    form: Form  # what else is needed to rebuild it; ``in_words`` compares two of a class
    #: Where each child is, in Python's notation: ``.loss``, ``['x']``, ``[0]``.
    labels: tuple[str, ...]
    children: list[Any]  # nested values

    @property
    def in_words(self) -> str:
        """The class and its labels, as text."""
        if self.name in ("t", "l"):
            return f"a {'tuple' if self.name == 't' else 'list'} of {len(self.children)}"
        if self.name == "d":
            return f"a dict with the keys {', '.join(sorted(map(repr, self.form)))}"
        context = f" (context {self.form[0]})" if len(self.form) == 1 else ""
        return f"a {self.name.replace(':', '.')} with {', '.join(sorted(self.labels))}{context}"

    def like(self, children: Iterable[Any]) -> Any:
        """Return a container of the same class and form with other children."""
        return built(self.name, self.form, list(children))


def opened(value: Any, where: str = "") -> Container | None:
    """Take a container apart; return None if its class is not in the table above.

    ``where`` says where it is, for errors: ``[0].hidden``. Raises ``BoundaryError`` if no process
    could rebuild it.
    """
    cls = type(value)
    if cls is tuple or cls is list:
        labels = tuple([f"[{k}]" for k in range(len(value))])
        return Container("t" if cls is tuple else "l", (), labels, list(value))
    if cls is dict:
        labels = tuple([f"[{key!r}]" for key in value])
        return Container("d", tuple(value), labels, list(value.values()))
    base: Any = _base_of(cls)
    is_registered = _is_registered(cls)
    if base is None and not is_registered:
        return None
    name = f"{cls.__module__}:{cls.__qualname__}"
    at = f" at {where}" if where else ""
    if _class_named(name) is not cls:
        raise BoundaryError(
            f"a {cls.__module__}.{cls.__qualname__}{at} cannot travel between stages: the class "
            "is not found in its module by this name, so define it at the module's top level"
        )
    if is_registered:
        return _opened_by_registration(value, name, at)
    return _opened_by_parts(value, base, name, at)


def built(name: str, form: Form, children: Sequence[Any]) -> Any:
    """Reverse :func:`opened`; ``BoundaryError`` if this process cannot."""
    if name in ("t", "l"):
        return tuple(children) if name == "t" else list(children)
    if name == "d":
        return dict(zip(form, children, strict=True))
    cls = _class_named(name)
    base: Any = _base_of(cls) if cls is not None else None
    if cls is None or (base is None and not _is_registered(cls)):
        raise BoundaryError(
            f"a {name.replace(':', '.')} came from another rank, but this one has no such named "
            "tuple, dataclass, Mapping or registered type: import its module on every rank"
        )
    try:
        if _is_registered(cls):
            return _built_by_registration(cls, form, children)
        return _built_by_parts(cls, base, form, children)
    except Exception as error:
        raise BoundaryError(
            f"a {name.replace(':', '.')} cannot be put together from what came: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_keys(keys: Iterable[Any], at: str) -> None:
    """Raise ``BoundaryError`` if a dict's key cannot travel; ``at`` says where the dict is."""
    for key in keys:
        if type(key) is not str and type(key) is not int:
            raise BoundaryError(
                f"a dict key of type {type(key).__qualname__}{at} cannot travel between stages: "
                "use str or int keys"
            )


def _class_named(name: str) -> type | None:
    """Return a class of a module that is imported already; runs no code of either."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        scope = vars(found) if isinstance(found, (ModuleType, type)) else {}
        found = scope.get(part)
    return found if isinstance(found, type) else None


def _base_of(cls: type) -> type | None:
    """Return the built-in class that a container's class extends; None for other classes.

    None, too, for a class whose instances hold hidden data of C code, and for one with ``__del__``,
    which would run on attributes that another process chose.
    """
    if _defined(cls, "__del__") is not None:
        return None
    if issubclass(cls, tuple):
        return tuple if isinstance(_defined(cls, "_fields"), tuple) else None
    is_dataclass = _defined(cls, "__dataclass_fields__") is not None
    if not is_dataclass and not issubclass(cls, Mapping):
        return None
    for base in (OrderedDict, defaultdict, dict):
        if issubclass(cls, base):
            return base
    is_python = is_dataclass or isinstance(_defined(cls, "__getitem__"), FunctionType)
    return object if is_python else None


def _defined(cls: type, name: str) -> Any:
    """Return what a class or a base defines by a name; calls no metaclass, which could run code."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _attributes_of(value: Any) -> dict[str, Any]:
    attributes = {}
    for name, slot in _slots_of(type(value)).items():
        try:
            attributes[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    if type(value).__dictoffset__:
        attributes.update(object.__getattribute__(value, "__dict__"))
    attributes.pop("__orig_class__", None)  # set by Box[int](1), for type checkers
    return attributes


def _slots_of(cls: type) -> dict[str, MemberDescriptorType]:
    return {
        name: member
        for each in reversed(cls.__mro__)
        for name, member in vars(each).items()
        if isinstance(member, MemberDescriptorType)
    }


def _opened_by_parts(value: Any, base: Any, name: str, at: str) -> Container:
    # Past methods of its class.
    entries = enumerate(tuple.__iter__(value)) if base is tuple else ()
    items = dict(entries if base in (tuple, object) else base.items(value))
    check_keys(items, at)
    attributes = _attributes_of(value)
    factory = ""
    if base is defaultdict and getattr(attributes["default_factory"], "__name__", "") in _FACTORIES:
        factory = attributes.pop("default_factory").__name__
    missing = object()
    # Hugging Face's outputs hold each value as an item and as an attribute: it travels once.
    twice = tuple(a for a, child in attributes.items() if items.get(a, missing) is child)
    once = {a: child for a, child in attributes.items() if a not in twice}
    return Container(
        name,
        (tuple(items), tuple(attributes), twice, factory),
        (*(f"[{key!r}]" for key in items), *(f".{attribute}" for attribute in once)),
        [*items.values(), *once.values()],
    )


def _built_by_parts(cls: type, base: Any, form: Form, children: Sequence[Any]) -> Any:
    keys, names, twice, factory = form
    items = dict(zip(keys, children[: len(keys)], strict=True))
    value = tuple.__new__(cls, items.values()) if base is tuple else base.__new__(cls)
    if base is not tuple:
        for key, child in items.items():
            base.__setitem__(value, key, child)
    once = [name for name in names if name not in twice]
    by_name = dict(zip(once, children[len(keys) :], strict=True))
    attributes = {name: items[name] if name in twice else by_name[name] for name in names}
    if factory:
        attributes["default_factory"] = _FACTORIES[factory]
    slots = _slots_of(cls)
    for name, child in attributes.items():
        if name in slots:
            slots[name].__set__(value, child)
        else:
            object.__getattribute__(value, "__dict__")[name] = child
    return value


def _is_registered(cls: type) -> bool:
    return cls in pytree.SUPPORTED_NODES and cls not in (OrderedDict, defaultdict)


def _opened_by_registration(value: Any, name: str, at: str) -> Container:
    cls = type(value)
    children, context = pytree.SUPPORTED_NODES[cls].flatten_fn(value)
    dumped = pytree.SUPPORTED_SERIALIZED_TYPES[cls].to_dumpable_context
    text = repr(context if dumped is None else dumped(context))
    try:
        is_plain = repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        is_plain = False
    if not is_plain:
        raise BoundaryError(
            f"a {name.replace(':', '.')}{at} cannot travel between stages: the context that its "
            "function registered with torch.utils._pytree returns is not of plain values; "
            "register to_dumpable_context and from_dumpable_context"
        )
    children = list(children)
    return Container(name, (text,), tuple(f"[{k}]" for k in range(len(children))), children)


def _built_by_registration(cls: type, form: Form, children: Sequence[Any]) -> Any:
    if cls is torch.Size:  # which torch itself registers so that it becomes a tuple
        return torch.Size(children)
    context = ast.literal_eval(form[0])
    read: Callable[[Any], Any] | None
    read = pytree.SUPPORTED_SERIALIZED_TYPES[cls].from_dumpable_context
    unflatten = pytree.SUPPORTED_NODES[cls].unflatten_fn
    return unflatten(list(children), context if read is None else read(context))
