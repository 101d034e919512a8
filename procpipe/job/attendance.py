"""Detects the end of processes that are not connected yet; needed without a launcher.

From the moment its first stage is built, each process writes its pid into rank 0's store, and
looks at those of its host:

    process/<rank>    {"boot": …, "namespace": …, "pid": 4711, "started": 123456}

Process numbers mean the same only within one boot and one PID namespace, so processes on other
hosts and in other containers are not looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from procpipe.errors import PeerLostError
from procpipe.job.keys import given_key
from procpipe.job.rollcall import has_launchers_store
from procpipe.processes import boot_id, has_ended, start_ticks_of

if TYPE_CHECKING:
    from procpipe.job.store import JobStore

#: How often to look which ranks have come, and whether they have ended.
_LOOK_EVERY_S = 0.1

#: What processes have in common of which one can see the other's number.
_SAME_ON_HOST = ("boot", "namespace")


def announce(rank: int, timeout_s: float) -> None:
    """Note in the store which process this is, unless a launcher monitors it; never blocks.

    A background thread waits for the store for ``timeout_s``.
    """
    if not has_launchers_store():
        _announce(os.getpid(), rank, timeout_s)


@functools.cache  # once a process: a forked one has another number
def _announce(pid: int, rank: int, timeout_s: float) -> None:
    is_over = threading.Event()

    def note() -> None:
        from procpipe.job.store import JobStore, launchers_store

        with contextlib.suppress(RuntimeError, OSError, ValueError):  # the first call raises it
            launchers = launchers_store(timeout_s, is_over.is_set)
            store = JobStore(launchers, "procpipe/", key=given_key(), timeout_s=timeout_s)
            store.set(f"process/{rank}", json.dumps(_described(pid)))

    def end() -> None:
        is_over.set()  # do not wait for the store
        thread.join()

    if rank == 0:  # it holds the store
        note()
        return
    thread = threading.Thread(target=note, name="procpipe-announcement", daemon=True)
    thread.start()
    atexit.register(end)


def _described(pid: int) -> dict[str, str | int]:
    """Describe a process of this namespace; {} if that cannot be read."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        started = start_ticks_of(pid)
        return {"boot": boot_id(), "namespace": namespace, "pid": pid, "started": started}
    except (OSError, ValueError, IndexError):
        return {}


class Attendance:
    """The processes of the other ranks on this host, looked at now and then."""

    def __init__(self, store: JobStore, others: Iterable[int]) -> None:
        self._store = store
        self._ours = _described(os.getpid())
        self._unknown = set(others)
        self._local: dict[int, dict[str, Any]] = {}
        self._looked_s = 0.0

    def check(self) -> None:
        """Raise ``PeerLostError`` if one of them has ended."""
        now_s = time.monotonic()
        if now_s < self._looked_s + _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for rank in sorted(self._unknown):
            if self._store.check([f"process/{rank}"]):
                self._unknown.discard(rank)
                noted = json.loads(self._store.get(f"process/{rank}"))
                if noted and all(noted[name] == self._ours.get(name) for name in _SAME_ON_HOST):
                    self._local[rank] = noted
        for rank, noted in sorted(self._local.items()):
            if has_ended(noted["pid"], noted["started"]):
                raise PeerLostError(
                    rank,
                    f"rank {rank} ended without a message before all ranks were connected: it was "
                    "killed (out of memory?), crashed, or its script ended; see its own output and "
                    "exit code",
                )
