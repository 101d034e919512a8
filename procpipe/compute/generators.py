"""The random number generators that layers may draw from, and their states.

    torch's               of the CPU and, on a GPU, of the stage's device
    Python's and NumPy's  the global ones: ``random.random()``, ``numpy.random.rand()``

To read NumPy's takes longer than a small layer, so it counts only where ``numpy.random`` is loaded,
which torch does not do. Other sources (a generator that a layer holds, ``os.urandom``) cannot be
found here; ``compute.digests`` detects them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from procpipe.errors import RecomputeError

_NUMPY = "numpy.random"

#: The place of NumPy's global generator before its first number: loaded, and seeded.
_UNUSED = (623, 624)


class Generator(NamedTuple):
    """One generator, by how its state is read and set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def generators(device: torch.device) -> list[Generator]:
    """Return torch's generators of the CPU and a GPU, Python's and, once it is loaded, NumPy's."""
    found = [
        Generator(torch.get_rng_state, torch.set_rng_state),
        Generator(random.getstate, random.setstate),
    ]
    if device.type == "cuda":
        get = partial(torch.cuda.get_rng_state, device)
        found.append(Generator(get, partial(torch.cuda.set_rng_state, device=device)))
    if draws := sys.modules.get(_NUMPY):
        found.append(Generator(partial(draws.get_state, legacy=False), draws.set_state))
    return found


def check_numpy(known: Sequence[Generator]) -> None:
    """Check, after a forward, that it has not both loaded NumPy's generator and drawn from it.

    Its first state is then not that of a ``known`` one, so that it cannot be repeated.

    Raises:
        RecomputeError: it has.
    """
    draws = sys.modules.get(_NUMPY)
    if draws is None or known[-1].set is draws.set_state:
        return
    state = draws.get_state(legacy=False)
    if state["has_gauss"] or state["state"].get("pos") not in _UNUSED:
        raise RecomputeError(
            "a layer loaded numpy.random in its first forward and drew from it, so recomputation "
            "cannot repeat its numbers: import numpy.random before the first call of the stage"
        )


class RandomStates:
    """The states of generators before a forward."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._states = [(each, each.get()) for each in generators]

    def forget_undrawn(self, later: RandomStates) -> None:
        """Forget the states of generators that a forward has not drawn from.

        Most layers draw from none, and to set a state takes as long as to read it.

        Args:
            later: the same generators, after the forward.
        """
        pairs = zip(self._states, later._states, strict=True)
        self._states = [was for was, now in pairs if not _are_equal(was[1], now[1])]

    def put(self) -> RandomStates:
        """Set the generators; return the states that they had."""
        before = RandomStates([generator for generator, _ in self._states])
        for generator, state in self._states:
            generator.set(state)
        return before


def _are_equal(one: Any, other: Any) -> bool:
    """Compare two states of a generator; NumPy's are dicts of arrays, numbers and dicts."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        # Python's: 624 words that change together, of which a seed does not change the first, the
        # place of the next one, and a stored normal number.
        (_, words, rest), (_, other_words, other_rest) = one, other
        return (words[1], words[-1], rest) == (other_words[1], other_words[-1], other_rest)
    if isinstance(one, dict):
        return all(_are_equal(value, other.get(key)) for key, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
