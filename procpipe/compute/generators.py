"""The random number generators that layers may draw from, and their states.

    torch's               of the CPU and, on a GPU, of the stage's device
    Python's and NumPy's  the global ones: ``random.random()``, ``numpy.random.rand()``

Other sources (a generator that a layer holds, ``os.urandom``) cannot be found here;
``compute.digests`` detects them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch


class RandomSource(NamedTuple):
    """One generator, by how its state is read and set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def generators_of_torch(device: torch.device) -> list[RandomSource]:
    """Return torch's own generators: the CPU's, and a GPU's."""
    sources = [RandomSource(torch.get_rng_state, torch.set_rng_state)]
    if device.type == "cuda":
        get = partial(torch.cuda.get_rng_state, device)
        sources.append(RandomSource(get, partial(torch.cuda.set_rng_state, device=device)))
    return sources


def generators_of_libraries() -> list[RandomSource]:
    """Return Python's global generator and, once NumPy is loaded, its."""
    sources = [RandomSource(random.getstate, random.setstate)]
    if numpy := sys.modules.get("numpy"):
        # Loads numpy.random: a forward that did so first could not be repeated.
        draws = numpy.random
        sources.append(RandomSource(partial(draws.get_state, legacy=False), draws.set_state))
    return sources


def are_equal(one: Any, other: Any) -> bool:
    """Compare two states of a generator; NumPy's are dicts of arrays, numbers and dicts."""
    if isinstance(one, dict):
        return all(are_equal(value, other.get(key)) for key, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
