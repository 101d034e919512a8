"""The random number generators that layers may draw from, and their states.

    torch's               of the CPU and, on a GPU, of the stage's device
    Python's and NumPy's  the global ones: ``random.random()``, ``numpy.random.rand()``
    the layers' own       attributes of their modules, and entries of a list, tuple, set or dict
                          that is an attribute

Other sources (a global ``torch.Generator``, an attribute of an attribute, ``os.urandom``) cannot be
found here; ``compute.digests`` detects them.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

#: A Mersenne Twister in memory: 624 words and the position of the next one. CPython's ``random``
#: has the position first, NumPy's last.
_TWISTER = struct.Struct("=625I")

#: Bytes that show whether it has advanced: the position and 3 words, which change whenever the
#: position comes round to where it was.
_NUM_LOOKED_AT = 16

#: Entries of a container that is an attribute; a longer one is taken for data.
_MAX_ENTRIES = 1000

#: The attributes that every module has.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))


class RandomSource(NamedTuple):
    """One generator, by how its state is read and set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Generators:
    """The generators of a partition; ``modules`` are all modules of its layers."""

    def __init__(self, device: torch.device) -> None:
        self.modules: Sequence[nn.Module] = ()
        python = _Python()
        self._global = [*generators_of_torch(device), RandomSource(python.get, python.set)]
        self._has_numpy = False
        self._sources: list[RandomSource] | None = None

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Start a mini-batch, before which layers may have been given other generators."""
        self.modules = modules
        self._sources = None

    def sources(self) -> list[RandomSource]:
        """Return the generators that layers may draw from in this mini-batch."""
        if self._sources is None:
            if not self._has_numpy and "numpy" in sys.modules:
                # Loads numpy.random, 9 ms: a forward that did so first could not be repeated.
                numpy = _NumPy(sys.modules["numpy"].random)
                self._global.append(RandomSource(numpy.get, numpy.set))
                self._has_numpy = True
            self._sources = [*self._global, *_held_by(self.modules)]
        return self._sources


def generators_of_torch(device: torch.device) -> list[RandomSource]:
    """Return torch's own generators: the CPU's, and a GPU's."""
    sources = [RandomSource(torch.get_rng_state, torch.set_rng_state)]
    if device.type == "cuda":
        get = partial(torch.cuda.get_rng_state, device)
        sources.append(RandomSource(get, partial(torch.cuda.set_rng_state, device=device)))
    return sources


class _Twister:
    """A global Mersenne Twister, whose state is read again only once its memory has changed.

    Reading a state takes 9 us in Python and 36 us in NumPy, a look at its memory 0.4 us. A state
    here is a pair: the memory, or None where it does not determine the state, and the library's
    state.
    """

    _look: Callable[[], Any]
    _read: Callable[[Any], tuple[Any, Any]]

    def __init__(self, write: Callable[[Any], object]) -> None:
        self._write = write
        self._newest: tuple[Any, Any] = (None, None)

    def get(self) -> tuple[Any, Any]:
        memory = self._look()
        if memory is None or memory != self._newest[0]:
            self._newest = self._read(memory)
        return self._newest

    def set(self, state: tuple[Any, Any]) -> None:
        memory, value = state
        # Another state may have the same memory: NumPy keeps a number outside of it.
        if state is not self._newest or memory != self._look():
            self._write(value)
            self._newest = state


class _Python(_Twister):
    """The generator behind the functions of ``random``."""

    def __init__(self) -> None:
        super().__init__(random.setstate)
        self._generator: Any = random._inst
        self._address = id(self._generator) + object.__basicsize__
        self._is_readable = self._is_where_expected()

    def _is_where_expected(self) -> bool:
        """Return whether the words are in memory where CPython 3.11 to 3.13 has them."""
        size = type(self._generator).__basicsize__ - object.__basicsize__
        if size < _TWISTER.size:
            return False
        position, *words = _TWISTER.unpack(ctypes.string_at(self._address, _TWISTER.size))
        _, expected, _ = random.getstate()
        return bool((*words, position) == expected)

    def _look(self) -> Any:
        if not self._is_readable:
            return random.getstate()
        memory = ctypes.string_at(self._address, _NUM_LOOKED_AT)
        return memory, self._generator.gauss_next

    def _read(self, memory: Any) -> tuple[Any, Any]:
        return memory, random.getstate()


class _NumPy(_Twister):
    """The generator behind the functions of ``numpy.random``.

    It draws normal numbers in pairs and keeps the second outside of the memory looked at. While it
    holds one, the memory does not determine the state.
    """

    def __init__(self, numpy_random: ModuleType) -> None:
        super().__init__(numpy_random.set_state)
        self._random = numpy_random
        self._bit_generator: Callable[[], Any] = getattr(
            numpy_random, "get_bit_generator", lambda: None
        )

    def _look(self) -> Any:
        generator = self._bit_generator()  # a user may replace it
        if type(generator) is not self._random.MT19937:
            return None
        end = generator.ctypes.state_address + _TWISTER.size
        return ctypes.string_at(end - _NUM_LOOKED_AT, _NUM_LOOKED_AT)

    def _read(self, memory: Any) -> tuple[Any, Any]:
        state = self._random.get_state(legacy=False)
        return (None if state["has_gauss"] else memory), state


def _held_by(modules: Iterable[nn.Module]) -> list[RandomSource]:
    """Find the generators among the modules' attributes, each once."""
    numpy_random = sys.modules.get("numpy.random")
    classes: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy_random is not None:
        classes += numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator
    found: dict[int, Any] = {}
    for module in modules:
        attributes = vars(module)
        for name in attributes.keys() - _OF_ALL_MODULES:
            value = attributes[name]
            if isinstance(value, classes):
                found[id(value)] = value
            elif isinstance(value, (list, tuple, set, dict)) and len(value) <= _MAX_ENTRIES:
                entries = value.values() if isinstance(value, dict) else value
                found |= {id(entry): entry for entry in entries if isinstance(entry, classes)}
    return [*filter(None, map(_source_of, found.values()))]


def _source_of(generator: Any) -> RandomSource | None:
    """Return how the state of a generator is read and set; None if it has none."""
    if isinstance(generator, torch.Generator):
        return RandomSource(generator.get_state, generator.set_state)
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return RandomSource(generator.getstate, generator.setstate)
    if hasattr(generator, "get_state"):  # a numpy.random.RandomState
        return RandomSource(partial(generator.get_state, legacy=False), generator.set_state)
    bits = getattr(generator, "bit_generator", generator)
    return RandomSource(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
