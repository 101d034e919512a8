"""Finds out which processes make up this round of the job, before any is connected.

A launcher starts the job's processes again after a failure, or when a host has left or joined. Its
store may still hold what the round before left there: addresses of processes that have ended, their
failures. Nothing in the environment names a round on all hosts: each agent of torchrun counts its
own restarts, and a change of hosts does not count
(https://github.com/pytorch/pytorch/issues/135712). So the processes agree on it themselves:

    1  every rank takes its seat                seat/<rank>         a new random word
    2  rank 0 posts the words of all seats      list                again whenever a seat changes
    3  a rank on the list confirms it           here/<list>/<rank>  (each list once)
    4  all have confirmed                       the list's digest names the round

A process that has ended cannot confirm: a list with its word never becomes a round. A process
whose seat another has taken belongs to a round that is over, and raises an error.

A rank that cannot take part leaves a note. One written before this process was started is
of an earlier round.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from procpipe.channel.failures import decode_failure, encode_failure
from procpipe.errors import PeerLostError, RemoteStageError, WaitTimeoutError
from procpipe.job.grid import Grid
from procpipe.processes import start_ticks_of

if TYPE_CHECKING:
    from torch.distributed import Store

#: Until the store, which answers in about 0.1 ms, is asked again: at first, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


def wait_until(
    ready: Callable[[], object],
    *,
    check: Callable[[], None],
    deadline_s: float,
    timed_out: Callable[[], Exception],
) -> None:
    """Wait until ``ready()``, which looks into a store, with longer and longer pauses.

    ``check`` is called while waiting, and raises if the start has failed. At ``deadline_s`` the
    error that ``timed_out`` returns is raised. ``store.wait`` with a short timeout would print a
    warning each time.
    """
    pause_s = _FIRST_PAUSE_S
    while not ready():
        check()
        if time.monotonic() > deadline_s:
            raise timed_out()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def agree_on_round(store: Store, grid: Grid, *, timeout_s: float, check: Callable[[], None]) -> str:
    """Return a name of this round: equal on all ranks, different from the names of earlier rounds.

    Every rank calls it, and it waits for all of them. The store lives as long as the job, or as
    this round. ``check`` is called while waiting; it raises if the start has failed.

    Raises:
        PeerLostError: this process was replaced.
        WaitTimeoutError: a rank did not come within the timeout.
    """
    rank, num_ranks, numbers = grid.rank, grid.num_ranks, grid.numbers
    ours = secrets.token_hex(8)
    seats = [f"seat/{seat}" for seat in range(num_ranks)]
    store.set(seats[rank], ours)  # 1
    confirmed, awaited = "", seats

    def is_agreed() -> bool:
        nonlocal confirmed, awaited
        words = store.get("list").decode() if store.check(["list"]) else ""
        if rank == 0 and store.check(seats):  # 2
            posted, words = words, ",".join(store.get(seat).decode() for seat in seats)
            if words != posted:
                store.set("list", words)
        listed = words.split(",")
        if len(listed) != num_ranks or listed[rank] != ours:
            awaited = seats
            return False
        name = hashlib.sha256(words.encode()).hexdigest()[:16]
        awaited = [f"here/{name}/{seat}" for seat in range(num_ranks)]
        if confirmed != name:  # 3
            store.set(awaited[rank], "")
            confirmed = name
        return store.check(awaited)  # 4

    def check_all() -> None:
        if store.get(seats[rank]).decode() != ours:
            raise PeerLostError(
                numbers[rank],
                f"another process has started as rank {numbers[rank]} while this one waited for "
                "the others: the launcher has started the job again without ending this process",
            )
        check()

    def missing() -> WaitTimeoutError:
        late = [numbers[other] for other, key in enumerate(awaited) if not store.check([key])]
        return not_started(numbers[rank], late or [numbers[0]], timeout_s)

    deadline_s = time.monotonic() + timeout_s
    wait_until(is_agreed, check=check_all, deadline_s=deadline_s, timed_out=missing)
    return confirmed


def not_started(rank: int, missing: Sequence[int], waited_s: float) -> WaitTimeoutError:
    """Return the error of a rank that waited for others; all by their numbers in the job."""
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return WaitTimeoutError(
        f"rank {rank} waited {waited_s:.1f} s, but {who} did not start: did every process reach "
        "its first step?"
    )


class Notes:
    """Failures of ranks that could not take part, left in the store for those that wait for them.

    ``outlives_rounds`` says whether a note may be of an earlier round.
    """

    def __init__(self, store: Store, *, outlives_rounds: bool) -> None:
        self._store = store
        self._old = b""
        if outlives_rounds and store.check(["failure"]):
            found = store.get("failure")
            # A later note is of this round, whatever the hosts' clocks say.
            if json.loads(found)["written_s"] < process_start_s():
                self._old = found

    def leave(self, error: RemoteStageError) -> None:
        """Leave a note, unless this round has one."""
        note = encode_failure(error, written_s=time.time())
        self._store.compare_set("failure", self._old.decode(), note)

    def check(self) -> None:
        """Raise ``RemoteStageError`` if a rank of this round has left a note."""
        found = self._store.get("failure") if self._store.check(["failure"]) else self._old
        if found != self._old:
            raise decode_failure(found)


def has_launchers_store() -> bool:
    """Return whether torchrun's agent holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def process_start_s() -> float:
    """Return when this process was started, as ``time.time()`` counts, to 10 ms."""
    start_s = start_ticks_of("self") / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_s)
