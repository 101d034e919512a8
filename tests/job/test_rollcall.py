"""Which ranks take part in a round, in a store that may hold values of earlier rounds."""

from __future__ import annotations

import json
import threading
import time

import psutil
import pytest
from torch.distributed import HashStore

from procpipe.errors import PeerLostError, RemoteStageError, WaitTimeoutError
from procpipe.job.grid import Grid
from procpipe.job.rollcall import Notes, agree_on_round, process_start_s
from tests.cases import for_each


class Rank:
    """One rank's roll call, in a thread."""

    def __init__(self, store, rank, num_ranks, timeout_s=20.0, check=lambda: None):
        self.name = None
        self.error = None
        self._arguments = (store, rank, num_ranks, timeout_s, check)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        store, rank, num_ranks, timeout_s, check = self._arguments
        try:
            self.name = agree_on_round(
                store, Grid(rank, num_ranks), timeout_s=timeout_s, check=check
            )
        except BaseException as error:
            self.error = error

    def wait_end(self):
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        return self


class Seats:
    """Waits until a rank has a new value in the store."""

    def __init__(self, store):
        self._store = store

    def wait_taken(self, rank, old=None):
        deadline_s = time.monotonic() + 20.0
        while not self._store.check([f"seat/{rank}"]) or self._store.get(f"seat/{rank}") == old:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


def play_round(store, num_ranks, order):
    """Start the ranks one after the other, each once rank 0 has read the previous one."""
    ranks = {}
    for rank in order:
        old = store.get(f"seat/{rank}") if store.check([f"seat/{rank}"]) else None
        ranks[rank] = Rank(store, rank, num_ranks)
        Seats(store).wait_taken(rank, old)
        if 0 in ranks and all(store.check([f"seat/{seat}"]) for seat in range(num_ranks)):
            wait_list(store, num_ranks)
    names = {ranks[rank].wait_end().name for rank in order}
    assert len(names) == 1, [(rank, each.name, each.error) for rank, each in ranks.items()]
    return names.pop()


def wait_list(store, num_ranks):
    """Wait until rank 0 has posted the list of all seats, which may have old values."""
    deadline_s = time.monotonic() + 20.0
    while True:
        seats = ",".join(store.get(f"seat/{seat}").decode() for seat in range(num_ranks))
        if store.check(["list"]) and store.get("list").decode() == seats:
            return
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@for_each("sizes", [(2, 2, 2), (2, 3, 2, 3), (4, 2, 4)])
@for_each("is_reversed", [False, True])
def test_each_round_has_its_own_name_in_a_store_with_old_values(sizes, is_reversed):
    store = HashStore()
    names = []
    for num_ranks in sizes:
        order = range(num_ranks)
        names.append(play_round(store, num_ranks, order[::-1] if is_reversed else order))

    assert None not in names
    assert len(set(names)) == len(sizes)


def test_a_round_that_was_never_completed_is_ignored():
    store = HashStore()
    alone = Rank(store, 0, 2, timeout_s=0.0).wait_end()
    late = Rank(store, 1, 2, timeout_s=0.0).wait_end()

    assert isinstance(alone.error, WaitTimeoutError)
    assert isinstance(late.error, WaitTimeoutError)
    assert play_round(store, 2, (0, 1))


def test_the_timeout_error_names_the_missing_ranks():
    missing = Rank(HashStore(), 1, 4, timeout_s=0.1).wait_end()

    assert isinstance(missing.error, WaitTimeoutError)
    assert str(missing.error) == (
        "rank 1 waited 0.1 s, but ranks 0, 2, 3 did not start: did every process reach its first "
        "step?"
    )


def test_ranks_with_old_values_are_named_as_missing():
    store = HashStore()
    play_round(store, 3, (0, 1, 2))
    ranks = [Rank(store, rank, 3, timeout_s=0.5) for rank in (0, 1)]

    for rank in ranks:
        assert "but rank 2 did not start" in str(rank.wait_end().error)


def test_a_process_fails_if_another_has_taken_its_rank():
    store = HashStore()
    left_over = Rank(store, 1, 2)
    Seats(store).wait_taken(1)
    old = store.get("seat/1")
    new = Rank(store, 1, 2)
    Seats(store).wait_taken(1, old)
    error = left_over.wait_end().error
    first = Rank(store, 0, 2)

    assert first.wait_end().name == new.wait_end().name
    assert first.name is not None
    assert isinstance(error, PeerLostError)
    assert "another process has started as rank 1" in error.story


def test_waiting_ends_when_the_start_has_failed():
    def check():
        raise KeyError("another rank failed")

    assert isinstance(Rank(HashStore(), 0, 2, check=check).wait_end().error, KeyError)


# -- notes ---------------------------------------------------------------------------------------


def leave(store, story, age_s):
    """Write a note as a process did ``age_s`` before this process was started."""
    written_s = process_start_s() - age_s
    store.set("failure", json.dumps({"rank": 1, "story": story, "written_s": written_s}))


def test_a_note_is_read_by_waiting_ranks():
    store = HashStore()
    notes = Notes(store, outlives_rounds=True)
    notes.check()
    Notes(store, outlives_rounds=True).leave(RemoteStageError(2, "boom"))
    Notes(store, outlives_rounds=True).leave(RemoteStageError(3, "later"))

    for each in (notes, Notes(store, outlives_rounds=True)):
        with pytest.raises(RemoteStageError, match="rank 2 failed:\nboom"):
            each.check()


def test_a_note_of_an_earlier_round_is_ignored():
    store = HashStore()
    leave(store, "old", age_s=0.5)
    notes = Notes(store, outlives_rounds=True)
    notes.check()
    notes.leave(RemoteStageError(0, "new"))

    with pytest.raises(RemoteStageError, match="rank 0 failed:\nnew"):
        notes.check()


def test_a_note_that_arrives_during_the_wait_is_new_for_any_clock():
    store = HashStore()
    notes = Notes(store, outlives_rounds=True)
    leave(store, "an hour behind", age_s=3600)

    with pytest.raises(RemoteStageError, match="an hour behind"):
        notes.check()


def test_a_store_of_this_round_holds_no_old_notes():
    store = HashStore()
    leave(store, "started by hand, long before", age_s=60)

    with pytest.raises(RemoteStageError, match="by hand"):
        Notes(store, outlives_rounds=False).check()


def test_the_start_time_of_this_process():
    assert process_start_s() == pytest.approx(process_start_s(), abs=0.1)
    # psutil's time has an error of up to a second, as it rounds the start of the system.
    assert process_start_s() == pytest.approx(psutil.Process().create_time(), abs=1.5)
