"""Reports stalls while the main thread blocks in native code.

All other waits are for sockets, in ``Mesh.wait``. But gloo shows the end of a receive only in
``Work.wait``, and a wait with a time limit would break the group when it expires. So while the main
thread blocks there, a second thread reports how long it has waited:

    main thread     with native_waits.monitored(what):  pending.wait()
    this thread     every 0.2 s: how long has that been?     start_wait, stalled
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

#: How often the thread looks, at least.
_LOOK_EVERY_S = 0.2


class _Blocked(NamedTuple):
    """A wait of the main thread."""

    what: str
    since_s: float


class NativeWaits:
    """A thread that reports long waits; it starts with the first.

    Args:
        stall_timeout_s: how long until a wait is called a stall.
        start_wait: called with what is waited for, and since when.
        end_wait: called when a reported wait is over.
        stalled: called with what has been waited for as long as that, and how long; again after
            twice the time.
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
        self._reported: _Blocked | None = None
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def monitored(self, what: str) -> Iterator[None]:
        """Report the main thread's wait in this block if it is long; costs about a microsecond."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="procpipe native waits", daemon=True
            )
            self._thread.start()
        blocked = self._blocked = _Blocked(what, time.monotonic())
        try:
            yield
        except BaseException:  # the report stays as it is
            self._blocked = None
            raise
        with self._lock:
            self._blocked = None
            if self._reported is blocked:
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
                if self._reported is not blocked:
                    self._reported, stall_s = blocked, self._stall_timeout_s
                    self._start_wait(*blocked)
                if waited_s >= stall_s:
                    self._stalled(blocked.what, waited_s)
                    stall_s *= 2
