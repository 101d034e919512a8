"""The random number generators that layers may draw from, and their states.

    torch's               of the CPU and, on a GPU, of the stage's device
    Python's and NumPy's  the global ones: ``random.random()``, ``numpy.random.rand()``

To read NumPy's takes longer than a small layer, so it counts only where ``numpy.random`` is loaded,
which torch does not do. Other sources (a generator that a layer holds, ``os.urandom``) cannot be
found here; ``compute.digests`` detects them.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Sequence
from ctypes import string_at
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from procpipe.errors import RecomputeError

_NUMPY = "numpy.random"

#: The place of NumPy's global generator before its first number: loaded, and seeded.
_UNUSED = (623, 624)


class Generator(NamedTuple):
    """One generator, by how its state is read and set; states can be compared."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def generators(device: torch.device) -> list[Generator]:
    """Return torch's generators of the CPU and a GPU, Python's and, once it is loaded, NumPy's."""
    found = [
        _of_torch(torch.default_generator.get_state, torch.set_rng_state),
        Generator("random", random.getstate, random.setstate),
    ]
    if device.type == "cuda":
        get = partial(torch.cuda.get_rng_state, device)
        found.append(_of_torch(get, partial(torch.cuda.set_rng_state, device=device)))
    if draws := sys.modules.get(_NUMPY):
        found.append(
            Generator(
                _NUMPY,
                lambda: pickle.dumps(draws.get_state(legacy=False)),
                lambda state: draws.set_state(pickle.loads(state)),
            )
        )
    return found


def _of_torch(get: Callable[[], Tensor], set_state: Callable[[Tensor], None]) -> Generator:
    def get_bytes() -> bytes:
        state = get()
        return string_at(state.data_ptr(), state.nbytes)

    def set_bytes(state: bytes) -> None:
        set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Generator("torch", get_bytes, set_bytes)


def check_numpy(known: Sequence[Generator]) -> None:
    """Check, after a forward, that it has not both loaded NumPy's generator and drawn from it.

    Its first state is then not that of a ``known`` one, so that it cannot be repeated.

    Raises:
        RecomputeError: it has.
    """
    draws = sys.modules.get(_NUMPY)
    if draws is None or known[-1].name == _NUMPY:
        return
    state = draws.get_state(legacy=False)
    if state["has_gauss"] or state["state"].get("pos") not in _UNUSED:
        raise RecomputeError(
            "a layer loaded numpy.random in its first forward and drew from it, so recomputation "
            "cannot repeat its numbers: import numpy.random before the first call of the stage"
        )


class RandomStates:
    """The states of generators before a forward.

    Attributes:
        states: each generator with its state.
    """

    def __init__(self, generators: Sequence[Generator]) -> None:
        self.states = [(each, each.get()) for each in generators]

    def forget_undrawn(self, later: RandomStates) -> None:
        """Forget the states of generators that a forward has not drawn from.

        Args:
            later: the same generators, after the forward.
        """
        pairs = zip(self.states, later.states, strict=True)
        self.states = [was for was, now in pairs if was[1] != now[1]]

    def put(self) -> RandomStates:
        """Set the generators; return the states that they had."""
        before = RandomStates([generator for generator, _ in self.states])
        for generator, state in self.states:
            generator.set(state)
        return before
