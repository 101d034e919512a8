"""The test harness: it reports what happened on every rank, and leaves no processes behind."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import psutil
import pytest
import torch

from tests.dist.pool import Pool, Ranks
from tests.dist.report import RanksFailedError, RanksHungError

pytestmark = pytest.mark.dist


def whoami(world, greeting, *, mark="."):
    return f"{greeting} {world.rank} of {world.num_ranks}{mark}"


def pid(world):
    return os.getpid()


def exchange(world):
    world.store.set(f"from {world.rank}", str(world.rank * 10))
    source = (world.rank + 1) % world.num_ranks
    return int(world.store.get(f"from {source}"))


def exchange_pid(world):
    return os.getpid(), exchange(world)


def store_has(world, key):
    return world.store.check([key])


def double(world, tensor):
    return 2 * tensor


def threads_and_random(world):
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], torch.rand(3).tolist()


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


def exit_python(world):
    raise SystemExit(3)


def write(world):
    print("to stdout")
    os.write(2, b"to stderr\n")


def return_a_lock(world):
    return threading.Lock()


def die_on(world, rank, number):
    if world.rank == rank:
        os.kill(os.getpid(), number)
        signal.pause()  # if another thread takes the signal, this one runs on for a moment
    return "fine"


def exit_hard(world):
    print("last words")
    os._exit(7)


def wait_for_ever(world, rank):
    if world.rank == rank:
        thread = threading.Thread(target=hold_in_a_thread, daemon=True)
        thread.start()
        thread.join()
    return "fine"


def hold_in_a_thread():
    threading.Event().wait()


def interrupt(world, pid):
    os.kill(pid, signal.SIGUSR2)
    hold_in_a_thread()


def wait_in_the_store(world):
    world.store.get("never set")


def test_every_rank_gets_the_arguments_and_returns_in_order(ranks):
    outcomes = ranks(3).run(whoami, "rank", mark="!", world=False)

    assert [outcome.value for outcome in outcomes] == [
        "rank 0 of 3!",
        "rank 1 of 3!",
        "rank 2 of 3!",
    ]
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]


def test_processes_are_real_and_used_again(ranks):
    first = ranks(3).run(pid, world=False).values()
    second = ranks(2).run(pid, world=False).values()

    assert len({os.getpid(), *first}) == 4
    assert second == first[:2]


def test_ranks_share_a_store_that_the_next_run_does_not_see(ranks):
    assert ranks(2).run(exchange, world=False).values() == [10, 0]
    assert ranks(2).run(store_has, "from 0", world=False).values() == [False, False]


def test_tensors_are_sent_and_returned(ranks):
    tensor = torch.arange(4.0, dtype=torch.float64).requires_grad_()

    for value in ranks(2).run(double, tensor, world=False).values():
        assert torch.equal(value, 2 * tensor)


def test_workers_have_the_same_threads_and_random_numbers(ranks):
    first, second = ranks(2).run(threads_and_random, world=False).values()

    assert first == second
    assert first[:2] == (1, "1")
    assert ranks(2).run(threads_and_random, world=False).values() == [first, first]


def test_a_world_of_procpipe_is_built_and_closed(ranks):
    pytest.importorskip("procpipe.job.world")

    for _ in range(2):
        assert ranks(2).run(whoami, "rank").values() == ["rank 0 of 2.", "rank 1 of 2."]


def test_an_exception_is_reported_with_type_bases_notes_and_causes(ranks):
    outcomes = ranks(2).run(raise_on, 1, world=False)

    assert outcomes[0].value == "fine"
    error = outcomes[1].error
    assert error.type == "MyError"
    assert error.bases == ("ValueError", "Exception", "BaseException")
    assert error.is_a("MyError")
    assert error.is_a("ValueError")
    assert not error.is_a("TypeError")
    assert error.text == "text of the error\na note"
    assert "KeyError: 'cause'" in error.traceback
    assert "in raise_on" in error.traceback


def test_values_and_errors_raise_for_unexpected_outcomes(ranks):
    outcomes = ranks(2).run(raise_on, 1, world=False)

    with pytest.raises(RanksFailedError, match=r"rank\(s\) \[1\] failed(.|\n)*in raise_on"):
        outcomes.values()
    with pytest.raises(RanksFailedError, match=r"rank\(s\) \[0\] did not fail"):
        outcomes.errors()
    assert [e.type for e in ranks(2).run(exit_python, world=False).errors()] == ["SystemExit"] * 2


def test_warnings_are_errors(ranks):
    (error,) = ranks(1).run(warn, world=False).errors()

    assert error.type == "DeprecationWarning"


def test_output_is_kept_separately_for_each_run(ranks):
    (outcome,) = ranks(1).run(write, world=False)

    assert outcome.output.splitlines() == ["to stdout", "to stderr"]
    assert ranks(1).run(pid, world=False)[0].output == ""


def test_a_value_that_cannot_be_pickled_fails_its_rank(ranks):
    (error,) = ranks(1).run(return_a_lock, world=False).errors()

    assert error.type == "TypeError"
    assert "value that rank 0 returned" in error.text


def test_a_pool_has_a_limit(ranks):
    with pytest.raises(ValueError, match=r"ranks\(5\).* 1 to 4"):
        ranks(5)


def test_a_killed_rank_is_reported_and_all_are_replaced(ranks):
    before = ranks(3).run(pid, world=False).values()

    outcomes = ranks(2).run(die_on, 1, signal.SIGKILL, world=False)

    assert outcomes[0].value == "fine"
    assert outcomes[1].error.type == "ProcessDied"
    assert outcomes[1].error.text == "the process of rank 1 was ended by SIGKILL"
    assert not any(map(psutil.pid_exists, before))
    after = ranks(3).run(exchange_pid, world=False).values()
    assert not {pid for pid, _ in after} & set(before)
    assert [found for _, found in after] == [10, 20, 0]


def test_a_crash_is_reported_with_its_stack(ranks):
    (error,) = ranks(1).run(die_on, 0, signal.SIGSEGV, world=False).errors()

    assert error.text == "the process of rank 0 was ended by SIGSEGV"
    assert "in die_on" in error.traceback


def test_an_exit_code_and_the_last_output_are_reported(ranks):
    (outcome,) = ranks(1).run(exit_hard, world=False)

    assert outcome.error.text == "the process of rank 0 ended with exit code 7"
    assert outcome.output == "last words\n"


def test_a_hang_ends_with_the_stacks_of_all_threads(ranks):
    before = ranks(2).run(pid, world=False).values()
    start = time.monotonic()

    with pytest.raises(RanksHungError) as caught:
        ranks(2).run(wait_for_ever, 1, timeout_s=1.0, world=False)

    assert time.monotonic() - start < 10
    text = str(caught.value)
    assert "tests.dist.test_pool.wait_for_ever: rank(s) [1] of 2 did not end in 1.0 s" in text
    assert "--- rank 0 returned 'fine'" in text
    assert "in wait_for_ever" in text
    assert "in hold_in_a_thread" in text
    assert not any(map(psutil.pid_exists, before))
    assert ranks(2).run(whoami, "rank", world=False).values() == ["rank 0 of 2.", "rank 1 of 2."]


def test_a_hang_in_cpp_and_a_stopped_process_are_ended_too(ranks):
    hung = (wait_in_the_store,), (die_on, 0, signal.SIGSTOP)
    for function, *args in hung:
        ranks(1).run(pid, world=False)  # so that the process has imported this file
        with pytest.raises(RanksHungError, match=f"in {function.__name__}"):
            ranks(1).run(function, *args, timeout_s=1.0, world=False)


def test_an_interrupt_of_the_test_ends_the_run(ranks):
    def raise_interrupt(number, frame):
        raise KeyboardInterrupt

    before = ranks(1).run(pid, world=False).values()
    old = signal.signal(signal.SIGUSR2, raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks(1).run(interrupt, os.getpid(), world=False)
    finally:
        signal.signal(signal.SIGUSR2, old)

    assert not any(map(psutil.pid_exists, before))
    assert ranks(1).run(whoami, "rank", world=False).values() == ["rank 0 of 1."]


def test_closing_a_pool_leaves_no_process():
    pool = Pool()
    try:
        Ranks(pool, 2).run(pid, world=False)
        pids = pool.pids()
    finally:
        pool.close()

    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
