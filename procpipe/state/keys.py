"""What a module's values are called in files that other programs share.

    own key                    0.weight           1.attn.weight
       │  keys=                   │                     │
    key in the file     model.embed.weight   model.h.0.attn.weight

One map serves both directions: reading asks for each own key what it is called in the file, and
writing does likewise. Independent of files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from procpipe.stage import Stage

#: From a key of the full model to the key in the files.
Keys = Callable[[str], str]


@dataclass(frozen=True)
class FileKeys:
    """What the values of a module are called in a file."""

    own: dict[str, str]  # the key in the file by own key, in the order of the module's state dict
    #: By own key, all names of its tensor in the full model, in order. Only of tensors that have
    #: several.
    names: dict[str, tuple[str, ...]]
    to_file: Callable[[str], str]  # from any key of the full model to the key in the file

    @classmethod
    def of(cls, module: nn.Module, keys: Keys | None = str) -> FileKeys:
        """Apply a map, by default none, to a module's keys; None for the one that its model has.

        Raises:
            TypeError: the map is no function, or it returns what is no key of a tensor in a file.
        """
        to_file = _of_model(module) if keys is None else keys
        state = module.state_dict(keep_vars=True)
        own = {key: to_file(key) for key in state}
        for key, name in own.items():
            if not isinstance(name, str) or name == "__metadata__":
                raise TypeError(
                    f"keys= returned {name!r} for {key!r}, but must return a tensor's key in files"
                )
        return cls(own, _names(module, state), to_file)

    def to_read(self, saved: Container[str]) -> dict[str, str]:
        """Return, for each own key that can be read, under which key it is to be read.

        For a tensor with several names that is the last one that is saved, whose value plain
        PyTorch would leave in it.
        """
        found = {}
        for key, name in self.own.items():
            if key in self.names:
                others = map(self.to_file, reversed(self.names[key]))
                name = next((other for other in others if other in saved), name)
            if name in saved:
                found[key] = name
        return found

    def to_write(self) -> dict[str, str]:
        """Return what is to be written: own key -> key in the file.

        If several names of a tensor become one key in the file, the first one's stage writes it.
        """
        written = {}
        for key, name in self.own.items():
            names = self.names.get(key, (key,))
            if key == next((other for other in names if self.to_file(other) == name), key):
                written[key] = name
        return written

    def facts(self) -> list[list[str]]:
        """Return for rank 0, of each value: its own key, that in the file, its first name."""
        return [[key, name, self.names.get(key, (key,))[0]] for key, name in self.own.items()]


def collisions(facts: Iterable[list[str]]) -> list[str]:
    """Describe the keys of files that several tensors would share, given facts of all ranks."""
    users: dict[str, dict[str, str]] = {}
    for key, name, first in facts:
        users.setdefault(name, {}).setdefault(first, key)
    return few(
        f"{' and '.join(list(keys.values())[:3])} are different tensors, but keys= gives each the "
        f"key {name!r} in the file: give each one of its own"
        for name, keys in users.items()
        if len(keys) > 1
    )


def few(faults: Iterable[str]) -> list[str]:
    """Return the first five faults of a kind, and how many more there are."""
    faults = list(faults)
    more = len(faults) - 5
    return faults[:5] + ([f"… and {more} more like this"] if more > 0 else [])


def _of_model(module: nn.Module) -> Any:
    """Return the map that a model has as its attribute ``keys``; no map if it has none."""
    keys = None
    if isinstance(module, Stage):
        keys = module._cut.keys
    elif isinstance(module, nn.Sequential):
        keys = getattr(module, "keys", None)
    return str if keys is None or isinstance(keys, nn.Module) else keys  # a layer of this name


def _names(module: nn.Module, state: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return, by key, all names of each tensor that has several."""
    of_tensor: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            of_tensor.setdefault(id(value), []).append(key)
    names = {key: tuple(keys) for keys in of_tensor.values() if len(keys) > 1 for key in keys}
    if isinstance(module, Stage):  # and those on other stages
        for copy in (*module._tied.parameters, *module._tied.buffers):
            names |= dict.fromkeys(copy.all_names, copy.all_names)
    return names
