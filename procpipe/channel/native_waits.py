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
from collections.abc import Iterator
from contextlib import contextmanager

#: How often the thread looks, at least.
_LOOK_EVERY_S = 0.2

#: A wait: for what, and since when.
_Blocked = tuple[str, float]


class WaitReports:
    """Receives reports of one rank's waits; this base class ignores them."""

    def start_wait(self, what: str, since_s: float) -> None:
        """Handle a wait that began at ``since_s`` (``time.monotonic()``)."""

    def end_wait(self) -> None:
        """Handle the successful end of a reported wait."""

    def stalled(self, what: str, waited_s: float) -> None:
        """Handle a wait as long as the stall timeout; called again after twice the time."""

    def last_seen(self, peer: int) -> str:
        """Return a sentence on what a peer was doing when it died, or ""."""
        return ""


class NativeWaits:
    """A thread that reports long waits; it starts with the first."""

    def __init__(self, stall_timeout_s: float, reports: WaitReports) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._reports = reports
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
        blocked = self._blocked = (what, time.monotonic())
        try:
            yield
        except BaseException:  # the report stays as it is
            self._blocked = None
            raise
        with self._lock:
            self._blocked = None
            if self._reported is blocked:
                self._reports.end_wait()

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
                what, since_s = blocked
                waited_s = time.monotonic() - since_s
                if self._reported is not blocked:
                    self._reported, stall_s = blocked, self._stall_timeout_s
                    self._reports.start_wait(what, since_s)
                if waited_s >= stall_s:
                    self._reports.stalled(what, waited_s)
                    stall_s *= 2
