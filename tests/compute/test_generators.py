"""The generators that layers may draw from are found, and repeat from any earlier state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from procpipe.compute.generators import Generators
from tests.cases import for_each

CPU = torch.device("cpu")


def layer_with(**attributes: Any) -> nn.Sequential:
    layer = nn.Sequential(nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(layer[0], name, value)
    return layer


def draw_from(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(3).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return generator.standard_normal(3).tolist()


GLOBAL = {
    "torch": lambda: torch.rand(3).tolist(),
    "random": random.random,
    "random.gauss": lambda: [random.gauss(0, 1) for _ in range(3)],
    "random.shuffle": lambda: random.sample(range(99), 20),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy, one normal number": lambda: np.random.randn(),
    "numpy, two normal numbers": lambda: np.random.randn(2).tolist(),
    "numpy, exactly all words": lambda: np.random.bytes(4 * 624),
    "numpy, seeded": lambda: np.random.seed(np.random.randint(1000)),
}


def generators_of(*layers):
    generators = Generators(CPU)
    generators.begin([module for layer in layers for module in layer.modules()])
    return generators


def check_repeats(generators, draw, repetitions=7):
    """Check that each draw can be repeated, in reverse, without changing the numbers after it."""
    states, drawn = [], []
    for _ in range(repetitions):
        states.append([(source, source.get()) for source in generators.sources()])
        drawn.append(draw())
    present = [(source, source.get()) for source in generators.sources()]
    following = draw()
    for state, expected in zip(reversed(states), reversed(drawn), strict=True):
        for source, value in state:
            source.set(value)
        assert draw() == expected
    for source, value in present:
        source.set(value)
    assert draw() == following


@for_each("name", GLOBAL)
def test_global_generators_repeat(name):
    generators = generators_of()
    for num_before in range(3):  # a generator may have stored a second normal number
        for _ in range(num_before):
            np.random.randn(), random.gauss(0, 1)
        check_repeats(generators, GLOBAL[name])


def test_states_of_numpy_with_the_same_memory_are_told_apart():
    """Symptom: "recomputed with other random numbers", after normal numbers in micro-batches.

    NumPy draws them in pairs, and keeps the second outside of the memory that is looked at.
    """
    numpy = generators_of().sources()[-1]
    before = numpy.get()
    np.random.randn(2)
    without_second = numpy.get()
    expected = np.random.randn()
    numpy.set(before)
    np.random.randn()
    numpy.get()

    numpy.set(without_second)

    assert np.random.randn() == expected


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_a_bit_generator_set_in_numpy_repeats(bits):
    generators = generators_of()
    generators.sources()
    numpy_random: Any = np.random
    own = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(bits(1))
        for name, draw in GLOBAL.items():
            if name != "numpy, seeded":  # only the first bit generator can be seeded
                check_repeats(generators, draw)
    finally:
        numpy_random.set_bit_generator(own)


def test_if_the_memory_of_pythons_generator_is_unknown_its_state_is_compared(monkeypatch):
    monkeypatch.setattr(
        "procpipe.compute.generators._Python._is_where_expected", lambda self: False
    )
    check_repeats(generators_of(), GLOBAL["random.gauss"])


@for_each(
    "make",
    [
        torch.Generator,
        random.Random,
        np.random.default_rng,
        np.random.RandomState,
        np.random.PCG64,
        np.random.MT19937,
    ],
)
@for_each("where", ["attribute", "list", "tuple", "set", "dict"])
def test_generators_of_layers_repeat(make, where):
    own = make()
    holder = {
        "attribute": own,
        "list": [1, own],
        "tuple": (own,),
        "set": {own, None},
        "dict": {"a": own},
    }
    layer = layer_with(held=holder[where], again=own)
    check_repeats(generators_of(layer), lambda: draw_from(own))


def test_generators_given_to_layers_later_are_found_at_the_next_mini_batch():
    layer = layer_with()
    generators = generators_of(layer)
    before = len(generators.sources())
    own = torch.Generator()
    layer.get_submodule("0").own = own  # type: ignore[assignment]
    assert len(generators.sources()) == before
    generators.begin(list(layer.modules()))
    check_repeats(generators, lambda: draw_from(own))
    assert len(generators.sources()) == before + 1


def test_attributes_without_a_generators_state_are_ignored():
    layer = layer_with(
        system=random.SystemRandom(), text="x", data=[torch.Generator()] * 2000, none=None
    )
    assert len(generators_of(layer).sources()) == len(generators_of().sources())


def test_a_global_state_is_read_once_until_a_number_is_drawn():
    generators = generators_of()
    for name in ("random", "numpy"):
        np.random.seed(1)
        random.seed(1)
        before, again = ([source.get() for source in generators.sources()] for _ in range(2))
        GLOBAL[name]()
        after = [source.get() for source in generators.sources()]
        # torch, random, numpy
        assert [a is b for a, b in zip(before[1:], again[1:], strict=True)] == [True, True]
        same = [a is b for a, b in zip(before[1:], after[1:], strict=True)]
        assert same == [name != "random", name != "numpy"]
