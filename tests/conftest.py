"""The fixture ``ranks``, real processes to run a function on; and the choice of tests for GPUs.

    pytest                  all tests on CPUs, except those marked ``gpu``
    pytest -n auto          the same by several processes (pytest-xdist; make test)
    pytest --gpus           those marked ``gpu`` or ``on_gpus``, on this machine's CUDA devices
    pytest --gpus=share     the subset for this number of emulated GPUs (make test-gpu)

``on_gpus`` marks tests that run on CPUs and, unchanged, on the GPUs of tests/dist/devices.py. On a
module, it marks all tests that use ``ranks`` and are not marked ``only_on_cpus``. Both marks take
the least number of GPUs as an argument.
"""

from __future__ import annotations

import gc
import os
import random
import shlex
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.dist import devices, forks
from tests.dist.pool import Pool, Ranks
from tests.on_gpus import NUMBERS_OF_GPUS

# A time limit for each example would fail on a busy machine. Each run draws other examples.
settings.register_profile("tests", deadline=None, max_examples=50)
settings.load_profile("tests")

#: All tests in this folder start processes.
DIST = Path(devices.__file__).parent

#: Has the seed of what tests/fuzz and tests/faults draw, another one in each run.
FUZZ_SEED = "PROCPIPE_FUZZ_SEED"

#: Processes at a time; more would need more than 16 GiB of memory.
MOST_PROCESSES = 4


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Return ``ranks(n)``, whose ``run`` calls a function on ``n`` real processes."""
    pool = Pool()
    yield lambda num_ranks: Ranks(pool, num_ranks)
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpus``."""
    parser.addoption(
        "--gpus",
        nargs="?",
        choices=("all", "share"),
        const="all",
        help="run the tests for GPUs, and no others; share: only those for this number of GPUs",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the devices of all tests."""
    # Without bytecode each run would compile all tests, which is half of collecting them.
    sys.dont_write_bytecode = False
    # The usual 700 starts 10,000 collections in a run. The last test of each file ends with one.
    gc.set_threshold(50_000)
    # Set here before pytest-xdist starts processes, so that all have the same.
    os.environ.setdefault(FUZZ_SEED, str(random.randrange(10**6)))
    os.environ[devices.VARIABLE] = "gpus" if config.getoption("--gpus") else "cpus"
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        return  # it leaves the tests to pytest-xdist's processes: no import of torch, which is slow
    forks.find_launch()
    devices.seed_only_cpu()
    if devices.is_on_gpus() and not devices.num_gpus():
        raise pytest.UsageError("--gpus: there is no CUDA device that torch can use here")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let pytest-xdist start forks, in place of interpreters that import all anew."""
    if not config.pluginmanager.has_plugin("_cov"):  # it would measure a process twice
        forks.fork_server().load(*forks.OF_HF)  # which each would import as it collects tests
        for spec in specs:
            spec.python = shlex.join([sys.executable, forks.__file__])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, and keep those for these devices."""
    for item in items:
        has_processes = not {"pool", "ranks"}.isdisjoint(getattr(item, "fixturenames", ()))
        if has_processes or item.path.parent == DIST:
            item.add_marker(pytest.mark.dist)
    on_gpus = [item for item in items if num_needed(item)]
    if devices.is_on_gpus():
        kept = on_gpus
        if config.getoption("--gpus") == "share":
            kept = [item for item in on_gpus if devices.num_gpus() in numbers_for(item)]
        for item in kept:
            if devices.num_gpus() < (needed := num_needed(item)):
                reason = f"needs {needed} GPUs, not {devices.num_gpus()}"
                item.add_marker(pytest.mark.skip(reason=reason))
    else:
        kept = [item for item in items if item.get_closest_marker("gpu") is None]
    left_out = set(items) - set(kept)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = kept
    # Files with tests that start processes first: the others are short, so all end together.
    first = {item.path for item in items if item.get_closest_marker("dist")}
    items.sort(key=lambda item: item.path not in first)


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collections, which are then short."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After the last test of a file, collect garbage, and exclude what remains as well.

    That is mostly what tests have imported; each collection would read all of it again.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Undo ``gc.freeze`` for Triton, whose nanobind reports what outlives the interpreter.

    Other modules need not be freed, which would take seconds.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


def pytest_report_header() -> str:
    """Return the line that names the seed."""
    seed = os.environ[FUZZ_SEED]
    return f"random cases and faults of seed {seed}; to repeat them: {FUZZ_SEED}={seed}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes for ``-n auto``: one more than cores if tests wait."""
    waits: bool = config.option.markexpr != "not dist"
    return min(len(os.sched_getaffinity(0)) + waits, MOST_PROCESSES)


def num_needed(item: pytest.Item) -> int:
    """Return how many GPUs a test needs; 0 if it is not for GPUs."""
    own = [mark for mark in item.own_markers if mark.name == "on_gpus"]
    if not own and "ranks" in getattr(item, "fixturenames", ()):
        own = list(item.iter_markers("on_gpus"))
    if item.get_closest_marker("only_on_cpus"):
        own = []
    return max([0, *(int((*mark.args, 1)[0]) for mark in [*own, *item.iter_markers("gpu")])])


def numbers_for(item: pytest.Item) -> tuple[int, ...]:
    """Return with how many emulated GPUs a test runs.

    With ``every=True``, all numbers that are enough; otherwise one of them, chosen by the seed,
    which is 8 only for a test that needs 8.
    """
    needed = num_needed(item)
    enough = tuple(number for number in NUMBERS_OF_GPUS if number >= needed)
    marks = [*item.iter_markers("gpu"), *item.iter_markers("on_gpus")]
    if any(mark.kwargs.get("every") for mark in marks):
        return enough
    usual = enough[:-1] or enough
    seed = os.environ.get("EMULATED_GPU_SEED", "0")
    return (usual[zlib.crc32(f"{seed} {item.nodeid}".encode()) % len(usual)],)
