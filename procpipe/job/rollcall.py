"""Which processes make up this round of the job, before any of them knows where the others are.

A launcher starts the job's processes again after a failure, or when a host has gone or come, and
its store may have lived on with all that the round before has left there: addresses of processes
that are no more, their failures. Nothing in the environment names a round on all hosts: each agent
of torchrun counts the restarts of its own, and a change of hosts does not count
(https://github.com/pytorch/pytorch/issues/135712). So the processes find out themselves:

    1  every rank takes its seat            seat/<rank>         a word of its own, not an old one
    2  rank 0 posts who sits where          list                again whenever a seat is taken anew
    3  who finds itself there says so       here/<list>/<rank>  (each list once)
    4  all on the list have said so         the list's digest names the round, new for each

A process that is no more cannot say so: a list with one of its words never becomes a round. A
process whose seat another has taken belongs to a round that is over, and is told.

A rank that cannot come leaves a note. One left by a round before is known by its age: it was
written before this process was started.

Knows nothing of sockets, stages or tensors; ``store`` is any of torch's.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import psutil

from procpipe.errors import PeerLostError, RemoteStageError, WaitTimeoutError

#: How long until the store, which answers in about 0.1 ms, is asked again: at first, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


class KeyValues(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting for it to be set."""

    def check(self, keys: list[str], /) -> bool:
        """Say whether all of these are set."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return several values, waiting for all of them."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Replace the expected value; where there is none, expect ""."""


class Pause:
    """Waits between two looks at a store, longer each time.

    Not ``store.wait`` with a short timeout: each that ends writes a warning of its own.
    """

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def __call__(self) -> None:
        """Wait."""
        time.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)


def agree_on_round(
    store: KeyValues,
    rank: int,
    num_ranks: int,
    *,
    timeout_s: float,
    check: Callable[[], None],
) -> str:
    """Return a name of this round that all ranks share and that no round before had.

    Every rank calls it, and it waits for all of them.

    Args:
        store: lives as long as the job, or as this round.
        rank: this rank.
        num_ranks: the number of ranks in this round.
        timeout_s: how long to wait for the others.
        check: called while waiting; raises if the start was given up.

    Raises:
        PeerLostError: this process was replaced.
        WaitTimeoutError: a rank did not come within the timeout.
    """
    ours = secrets.token_hex(8)
    seats = [f"seat/{seat}" for seat in range(num_ranks)]
    deadline_s = time.monotonic() + timeout_s
    store.set(seats[rank], ours)  # 1
    said, pause = "", Pause()
    while True:
        words = store.get("list").decode() if store.check(["list"]) else ""
        if rank == 0 and store.check(seats):  # 2
            posted, words = words, ",".join(word.decode() for word in store.multi_get(seats))
            if words != posted:
                store.set("list", words)
        listed = words.split(",")
        if len(listed) == num_ranks and listed[rank] == ours:
            name = hashlib.sha256(words.encode()).hexdigest()[:16]
            here = [f"here/{name}/{seat}" for seat in range(num_ranks)]
            if said != name:  # 3
                store.set(here[rank], "")
                said = name
            if store.check(here):  # 4
                return name
        else:
            here = seats
        _check_seat(store, rank, ours)
        check()
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError(_missing_story(store, rank, here, timeout_s))
        pause()


def _check_seat(store: KeyValues, rank: int, ours: str) -> None:
    if store.get(f"seat/{rank}").decode() != ours:
        raise PeerLostError(
            rank,
            f"another process has started as rank {rank} while this one waited for the others: "
            "the launcher has formed the job anew, and left this process over",
        )


def _missing_story(store: KeyValues, rank: int, keys: list[str], timeout_s: float) -> str:
    missing = [other for other, key in enumerate(keys) if not store.check([key])]
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return (
        f"rank {rank} waited {timeout_s:.1f} s in vain for {who if missing else 'rank 0'} to "
        "start: did every process reach its first step?"
    )


@dataclass(frozen=True)
class _Note:
    rank: int
    story: str
    written_s: float
    is_lost: bool = False


class Notes:
    """The failures of ranks that could not come, left in the store for those that wait for them.

    Args:
        store: as for :func:`agree_on_round`, with the same keys' prefix.
        outlives_rounds: whether a note may be of a round before.
    """

    def __init__(self, store: KeyValues, *, outlives_rounds: bool) -> None:
        self._store = store
        self._old = b""
        if outlives_rounds and store.check(["failure"]):
            found = store.get("failure")
            # What is there later is of this round, whatever the hosts' clocks say.
            if _read(found).written_s < process_start_s():
                self._old = found

    def leave(self, rank: int, story: str, *, is_lost: bool = False) -> None:
        """Leave a note, unless another rank of this round has.

        Args:
            rank: whose failure it is.
            story: what happened.
            is_lost: whether that rank's process has ended without a word.
        """
        note = asdict(_Note(rank, story, time.time(), is_lost))
        self._store.compare_set("failure", self._old.decode(), json.dumps(note))

    def check(self) -> None:
        """Raise ``RemoteStageError`` if a rank of this round has left a note."""
        if self._store.check(["failure"]):
            found = self._store.get("failure")
            if found != self._old:
                note = _read(found)
                kind = PeerLostError if note.is_lost else RemoteStageError
                raise kind(note.rank, note.story)


def _read(text: bytes) -> _Note:
    return _Note(**json.loads(text))


def process_start_s() -> float:
    """Return when this process was started, in the time of ``time.time()``, to 10 ms."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # After the name, which may hold anything; the first field there is the third of all.
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age_s
    except (OSError, AttributeError):
        return float(psutil.Process().create_time())
