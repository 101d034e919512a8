"""Processes of their own for these tests, which have imported transformers once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dist.forks import OF_HF, fork_server
from tests.dist.pool import Pool, Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Return ``ranks(n)``, as tests/conftest.py does."""
    fork_server().load(*OF_HF)
    pool = Pool()
    yield lambda num_ranks: Ranks(pool, num_ranks)
    pool.close()
