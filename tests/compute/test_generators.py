"""The global generators repeat from any earlier state."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from procpipe import Stage
from procpipe.compute.generators import RandomStates, generators
from tests.cases import for_each
from tests.forked import in_child

CPU = torch.device("cpu")

GLOBAL = {
    "torch": lambda: torch.rand(3).tolist(),
    "random": random.random,
    "random.gauss": lambda: [random.gauss(0, 1) for _ in range(3)],
    "random.gauss, one": lambda: random.gauss(0, 1),
    "random, exactly all words": lambda: random.getrandbits(32 * 624),
    "random, seeded": lambda: random.seed(random.random()),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy, one normal number": lambda: np.random.randn(),
    "numpy, two normal numbers": lambda: np.random.randn(2).tolist(),
    "numpy, exactly all words": lambda: np.random.bytes(4 * 624),
    "numpy, seeded": lambda: np.random.seed(np.random.randint(1000)),
}


def states_now() -> RandomStates:
    return RandomStates(generators(CPU))


def check_repeats(draw, repetitions=7):
    """Check that each draw can be repeated, in reverse, without changing the numbers after it."""
    states, drawn = [states_now()], []
    for _ in range(repetitions):
        drawn.append(draw())
        states.append(states_now())
        states[-2].forget_undrawn(states[-1])
        assert len(states[-2].states) == 1
    present = states.pop()
    for state, expected in zip(reversed(states), reversed(drawn), strict=True):
        before = state.put()
        assert draw() == expected
        before.put()
    following = draw()
    present.put()
    assert draw() == following


@for_each("name", GLOBAL)
def test_global_generators_repeat(name):
    for num_before in range(3):  # a generator may have stored a second normal number
        for _ in range(num_before):
            np.random.randn(), random.gauss(0, 1)
        check_repeats(GLOBAL[name])


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_a_bit_generator_set_in_numpy_repeats(bits):
    numpy_random: Any = np.random
    own = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(bits(1))
        check_repeats(GLOBAL["numpy"])
    finally:
        numpy_random.set_bit_generator(own)


class Late(nn.Module):
    """Loads numpy's generator in its first forward; draws from it then, or only later."""

    def __init__(self, draws):
        super().__init__()
        self.draws, self.factors = draws, []

    def forward(self, x):
        import numpy.random

        self.factors.append(numpy.random.rand() if self.draws else 1.0)
        return x * self.factors[-1]


def train_late(draws):
    np.random.seed(0)
    del sys.modules["numpy.random"]
    late = Late(draws)
    model = nn.Sequential(late, nn.Linear(2, 1))
    stage = Stage(model, chunks=1, checkpoint="always", loss_fn=lambda y: y.sum())
    stage.step(torch.ones(1, 2))
    late.draws = True
    stage.step(torch.ones(1, 2))
    return len(late.factors), late.factors[2] == late.factors[3] != 1


def test_a_forward_that_loads_numpys_generator():
    """Its numbers are repeated from the next mini-batch on; it may not draw before."""
    assert "import numpy.random before" in in_child(lambda: train_late(draws=True))
    assert in_child(lambda: train_late(draws=False)) == "(4, True)"
