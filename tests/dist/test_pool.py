"""The test harness: it reports what happened on every rank, and leaves no processes behind."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import psutil
import pytest

from tests.dist.pool import Pool, Ranks
from tests.dist.report import RanksFailedError, RanksHungError

pytestmark = pytest.mark.dist


def pid(world):
    return os.getpid()


class MyError(ValueError):
    pass


def raise_on(world, rank):
    if world.rank == rank:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            error = MyError("text of the error")
            error.add_note("a note")
            raise error from cause
    return "fine"


def warn(world):
    warnings.warn("old ways", DeprecationWarning, stacklevel=1)


def die_on(world, rank, number):
    if world.rank == rank:
        os.kill(os.getpid(), number)
        signal.pause()  # if another thread takes the signal, this one runs on for a moment
    return "fine"


def wait_for_ever(world, rank):
    if world.rank == rank:
        thread = threading.Thread(target=hold_in_a_thread, daemon=True)
        thread.start()
        thread.join()
    return "fine"


def hold_in_a_thread():
    threading.Event().wait()


def test_an_exception_is_reported_with_type_bases_notes_and_causes(ranks):
    outcomes = ranks(2).run(raise_on, 1, world=False)

    assert outcomes[0].value == "fine"
    error = outcomes[1].error
    assert (error.type, error.text) == ("MyError", "text of the error\na note")
    assert error.is_a("MyError")
    assert error.is_a("ValueError")
    assert not error.is_a("TypeError")
    assert "KeyError: 'cause'" in error.traceback
    assert "in raise_on" in error.traceback
    with pytest.raises(RanksFailedError, match=r"rank\(s\) \[1\] failed(.|\n)*in raise_on"):
        outcomes.values()
    with pytest.raises(RanksFailedError, match=r"rank\(s\) \[0\] did not fail"):
        outcomes.errors()
    (error,) = ranks(1).run(warn, world=False).errors()
    assert error.type == "DeprecationWarning"


def test_a_crash_is_reported_and_all_are_replaced(ranks):
    before = ranks(3).run(pid, world=False).values()

    outcomes = ranks(2).run(die_on, 1, signal.SIGSEGV, world=False)

    assert outcomes[0].value == "fine"
    assert outcomes[1].error.type == "ProcessDied"
    assert outcomes[1].error.text == "the process of rank 1 was ended by SIGSEGV"
    assert "in die_on" in outcomes[1].error.traceback
    assert not any(map(psutil.pid_exists, before))
    assert not {*ranks(3).run(pid, world=False).values()} & {*before}


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


def test_closing_a_pool_leaves_no_process():
    pool = Pool()
    try:
        pids = Ranks(pool, 2).run(pid, world=False).values()
    finally:
        pool.close()

    assert not any(map(psutil.pid_exists, pids))
