"""The test harness: it reports what happened on every rank, and leaves no processes behind."""

from __future__ import annotations

import os
import threading

import psutil
import pytest

from tests.dist.report import RanksHungError

pytestmark = pytest.mark.dist


def pid(world):
    return os.getpid()


def wait_for_ever(world, rank):
    if world.rank == rank:
        thread = threading.Thread(target=hold_in_a_thread, daemon=True)
        thread.start()
        thread.join()
    return "fine"


def hold_in_a_thread():
    threading.Event().wait()


def double(world, x):  # of the module's top level; runs on every rank
    return 2 * x + world.rank


def test_double(ranks):
    assert ranks(2).run(double, 21).values() == [42, 43]


def test_a_hang_ends_with_the_stacks_of_all_threads(ranks):
    before = ranks(2).run(pid, world=False).values()

    with pytest.raises(RanksHungError) as caught:
        ranks(2).run(wait_for_ever, 1, timeout_s=1.0, world=False)

    text = str(caught.value)
    assert "tests.dist.test_pool.wait_for_ever: rank(s) [1] of 2 did not end in 1.0 s" in text
    assert "--- rank 0 returned 'fine'" in text
    assert "in wait_for_ever" in text
    assert "in hold_in_a_thread" in text
    assert not any(map(psutil.pid_exists, before))
