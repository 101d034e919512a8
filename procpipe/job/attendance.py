"""Detects the end of processes that are not connected yet; needed without a launcher.

From the moment its first stage is built, each process writes its pid into rank 0's store, and
polls those of its host by their pidfd:

    process/<rank>    {"boot": …, "namespace": …, "pid": 4711, "started": 123456}

Process numbers mean the same only within one boot and one PID namespace, so processes on other
hosts and in other containers are not polled.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Iterable

from procpipe.errors import PeerLostError
from procpipe.job.keys import given_key
from procpipe.job.rollcall import KeyValues
from procpipe.processes import boot_id, start_ticks_of

#: How often to look which ranks have come.
_LOOK_EVERY_S = 0.1


def _own_process() -> dict[str, str | int] | None:
    try:
        namespace, pid = os.stat("/proc/self/ns/pid").st_ino, os.getpid()
        started = start_ticks_of(pid)
        return {"boot": boot_id(), "namespace": namespace, "pid": pid, "started": started}
    except (OSError, ValueError, IndexError):
        return None


class Announcement:
    """Notes this process in the store; in the background where the store may not exist yet."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if rank == 0:  # it holds the store
            self._note()
        else:
            self._thread = threading.Thread(
                target=self._note, name="procpipe-announcement", daemon=True
            )
            self._thread.start()
            atexit.register(self.end)

    def end(self) -> None:
        """End the thread, without waiting for the store."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _note(self) -> None:
        from procpipe.job.store import JobStore, launchers_store

        with contextlib.suppress(RuntimeError, OSError, ValueError):  # the first call raises it
            launchers = launchers_store(self._timeout_s, self._is_over.is_set)
            store = JobStore(launchers, "procpipe/", key=given_key(), timeout_s=self._timeout_s)
            store.set(f"process/{self._rank}", json.dumps(_own_process()))


class Attendance:
    """The processes of the other ranks on this host, polled for their end."""

    def __init__(self, store: KeyValues, others: Iterable[int]) -> None:
        self._store = store
        self._ours = _own_process()
        self._unknown = set(others)
        self._ranks: dict[int, int] = {}
        self._poller = select.poll()
        self._looked_s = 0.0

    def check(self) -> None:
        """Raise ``PeerLostError`` if one of them has ended."""
        now_s = time.monotonic()
        if self._unknown and now_s > self._looked_s + _LOOK_EVERY_S:
            self._looked_s = now_s
            for rank in sorted(self._unknown):
                if self._store.check([f"process/{rank}"]):
                    self._unknown.discard(rank)
                    self._add(rank, self._store.get(f"process/{rank}"))
        ended = sorted(self._ranks[descriptor] for descriptor, _ in self._poller.poll(0))
        if ended:
            raise _lost(ended[0])

    def close(self) -> None:
        """Poll no longer."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()
        self._poller = select.poll()
        self._unknown.clear()

    def _add(self, rank: int, noted: bytes) -> None:
        process = json.loads(noted)
        if self._ours is None or process is None:
            return
        if any(process[name] != self._ours[name] for name in ("boot", "namespace")):
            return
        try:
            descriptor = os.pidfd_open(process["pid"])
        except ProcessLookupError:
            raise _lost(rank) from None
        except OSError:  # too many open files, for instance
            return
        self._ranks[descriptor] = rank
        self._poller.register(descriptor, select.POLLIN)
        with contextlib.suppress(OSError):
            if start_ticks_of(process["pid"]) != process["started"]:  # the number was reused
                raise _lost(rank)


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(
        rank,
        f"rank {rank} ended without a word before all ranks were connected: it was killed (out of "
        "memory?), crashed, or its script ended; its own output and exit code tell more",
    )
