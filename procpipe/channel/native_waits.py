"""Watches over waits in native code, out of which this process's main thread cannot look.

All other waits are for sockets, in ``Mesh.wait``. But gloo tells that a receive is done only by
``Work.wait``, and a bounded one would break the group when its time is over. If the peer is stopped
in the middle of a transfer, nobody would hear of it:

    main thread     with lookout.watch(what):  pending.wait()      blocked, for as long as it takes
    this thread     now and then: how long has that been?          tells of the wait, and of a stall
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

#: How often the thread looks, at most and at least.
_LOOK_EVERY_S = 0.2


class _Blocked(NamedTuple):
    """A wait of the main thread."""

    what: str
    since_s: float


class Lookout:
    """A thread that tells of long waits; it starts with the first.

    Args:
        stall_timeout_s: how long until a wait is called a stall.
        start_wait: hears what is waited for, and since when.
        end_wait: hears that a wait it was told of is over.
        stalled: hears what has been waited for as long as that, and how long; again after twice
            the time.
    """

    def __init__(
        self,
        stall_timeout_s: float,
        start_wait: Callable[[str, float], None],
        end_wait: Callable[[], None],
        stalled: Callable[[str, float], None],
    ) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._start_wait = start_wait
        self._end_wait = end_wait
        self._stalled = stalled
        self._blocked: _Blocked | None = None
        self._told: _Blocked | None = None
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch over what the main thread does meanwhile; costs it about a microsecond."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="procpipe lookout", daemon=True)
            self._thread.start()
        blocked = self._blocked = _Blocked(what, time.monotonic())
        try:
            yield
        except BaseException:  # what was waited for stays told
            self._blocked = None
            raise
        with self._lock:
            self._blocked = None
            if self._told is blocked:
                self._end_wait()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        stall_s = self._stall_timeout_s
        every_s = min(_LOOK_EVERY_S, stall_s / 4)
        while not self._is_closed.wait(every_s):
            with self._lock:
                blocked = self._blocked
                if blocked is None:
                    continue
                waited_s = time.monotonic() - blocked.since_s
                if self._told is not blocked:
                    self._told, stall_s = blocked, self._stall_timeout_s
                    self._start_wait(*blocked)
                if waited_s >= stall_s:
                    self._stalled(blocked.what, waited_s)
                    stall_s *= 2
