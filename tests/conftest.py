"""What every test can use: ``ranks``, real processes to run a function on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dist.pool import Pool, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Give ``ranks(n)``, whose ``run`` calls a function on ``n`` real processes."""
    pool = Pool()
    yield lambda num_ranks: Ranks(pool, num_ranks)
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, and skip those that need a GPU where there is none."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.dist)
