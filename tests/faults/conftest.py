"""The seed of this run's rounds: a new one each time, which pytest prints."""

from __future__ import annotations

import random

import pytest

SEED = random.SystemRandom().randrange(10**6)


@pytest.fixture(scope="session")
def seed() -> int:
    """Return the seed."""
    return SEED


def pytest_report_collectionfinish() -> list[str]:
    """Return a line with the seed, and how to repeat the rounds."""
    return [f"fault test: python -m tests.faults --short --rounds 4 --seed {SEED}"]
