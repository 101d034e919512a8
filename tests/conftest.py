"""What every test can use: ``ranks``, real processes to run a function on; and who runs on GPUs.

    pytest                  all tests on CPUs; those marked ``gpu`` are left out
    pytest --gpus           those marked ``gpu``, on the CUDA devices that there are
    pytest --gpus=share     those of them that are for this number of emulated GPUs (make test-gpu)

``@pytest.mark.on_gpus`` makes a second test of one, marked ``gpu``, whose ranks compute on GPUs
(tests/dist/devices.py); of a module, it is for all tests that use ``ranks`` and are not marked
``only_on_cpus``. ``gpu`` and ``on_gpus`` may say how many GPUs there must be.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator

import pytest

from tests.dist import devices
from tests.dist.pool import Pool, Ranks
from tests.on_gpus import NUMBERS_OF_GPUS

#: Only tests that say so run with 8.
USUAL_NUMBERS = NUMBERS_OF_GPUS[:-1]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Give ``ranks(n)``, whose ``run`` calls a function on ``n`` real processes."""
    pool = Pool()
    yield lambda num_ranks: Ranks(pool, num_ranks)
    pool.close()


@pytest.fixture(autouse=True)
def test_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the ranks of the test compute on ``"cpus"`` or ``"gpus"``, which is returned."""
    kind = getattr(request, "param", None)
    kind = kind or ("gpus" if request.node.get_closest_marker("gpu") else "cpus")
    monkeypatch.setenv(devices.VARIABLE, kind)
    return kind


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpus``."""
    parser.addoption(
        "--gpus",
        nargs="?",
        choices=("all", "share"),
        const="all",
        help="run the tests marked gpu, and no others; share: only those for this number of GPUs",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make two tests of each that is marked ``on_gpus``; the mark of a module is for ``ranks``."""
    test = metafunc.definition
    mark = test.get_closest_marker("on_gpus")
    if mark in test.own_markers or (
        mark is not None
        and "ranks" in metafunc.fixturenames
        and test.get_closest_marker("only_on_cpus") is None
    ):
        assert mark is not None
        gpus = pytest.param("gpus", marks=pytest.mark.gpu(*mark.args, **mark.kwargs))
        metafunc.parametrize("test_devices", ["cpus", gpus], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, and keep those for these devices."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.dist)
    wanted = config.getoption("--gpus")
    on_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if wanted is None:
        left_out = [item for item in on_gpus if not item.get_closest_marker("hardware")]
        for item in on_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a real GPU: pytest --gpus"))
    else:
        num_gpus = devices.num_gpus()
        if not num_gpus:
            raise pytest.UsageError("--gpus: there is no CUDA device that torch can use here")
        for item in on_gpus:
            add_skips(item, num_gpus)
        left_out = [item for item in items if not item.get_closest_marker("gpu")]
        if wanted == "share":
            left_out += [item for item in on_gpus if num_gpus not in numbers_for(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.stash[LEFT_OUT] = len(left_out)


LEFT_OUT = pytest.StashKey[int]()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say how many tests need GPUs, and how they are run."""
    if config.getoption("--gpus") is None and (number := config.stash.get(LEFT_OUT, 0)):
        return [f"{number} tests on GPUs, real or emulated, are left out: make test-gpu runs them"]
    return []


def add_skips(item: pytest.Item, num_gpus: int) -> None:
    """Skip a test that these GPUs are not enough for, or not of the kind that it is about."""
    needed = num_needed(item)
    if num_gpus < needed:
        item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, not {num_gpus}"))
    for kind, is_right in (
        ("hardware", not devices.is_emulated()),
        ("emulated", devices.is_emulated()),
    ):
        if item.get_closest_marker(kind) and not is_right:
            item.add_marker(pytest.mark.skip(reason=f"is about {kind} GPUs"))


def num_needed(item: pytest.Item) -> int:
    """Return how many GPUs a test needs."""
    return max([1, *(int(mark.args[0]) for mark in item.iter_markers("gpu") if mark.args)])


def numbers_for(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of emulated GPUs that a test runs with: one, which the seed chooses."""
    needed = num_needed(item)
    enough = tuple(number for number in USUAL_NUMBERS if number >= needed)
    if any(mark.kwargs.get("every") for mark in item.iter_markers("gpu")):
        return tuple(number for number in NUMBERS_OF_GPUS if number >= needed)
    if not enough:
        return NUMBERS_OF_GPUS[-1:]
    seed = os.environ.get("EMULATED_GPU_SEED", "0")
    return (enough[zlib.crc32(f"{seed} {item.nodeid}".encode()) % len(enough)],)
