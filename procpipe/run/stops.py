"""Ends loops over batches on signals, on every rank at the same item, so that state can be saved.

    signal ──> any rank: its handler sets a flag
    before an item is read: all ranks agree whether a flag is set ──> the loop ends on every rank

A handler does nothing else. Failures do not depend on it, as Python runs handlers in the main
thread only, between two of its instructions.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

#: What a user gives: signals such as ``signal.SIGTERM``.
Signals = Collection[int]

_ALL = frozenset(signal.Signals)
_NEVER = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


class Stops:
    """One rank's flag, and the handlers that set it; ``has_failed`` says whether the job has.

    Attributes:
        is_stopped: whether the ranks have agreed to stop; then it stays so.
        is_signalled: whether this rank has got a signal.
    """

    def __init__(self, has_failed: Callable[[], bool]) -> None:
        self.is_stopped = False
        self.is_signalled = False
        self._has_failed = has_failed
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def handling(self, numbers: Collection[int]) -> Iterator[None]:
        """Handle signals in the block; after a signal, also behind it, until ``restore``.

        Otherwise a second signal, which launchers often send, would end the process in a save.
        """
        added = [number for number in numbers if number not in self._before]
        try:
            for number in added:
                self._before[number] = signal.signal(number, self._note)
            yield
        finally:
            if not (self.is_stopped or self.is_signalled):
                self.restore(added)

    def restore(self, numbers: Collection[int] = _ALL) -> None:
        """Set the handlers of signals that were there before."""
        with contextlib.suppress(ValueError):  # collected in another thread, which may not
            for number in self._before.keys() & {*numbers}:
                before = self._before[number]
                # None: one that was not set from Python cannot be set again.
                signal.signal(number, signal.SIG_DFL if before is None else before)
                del self._before[number]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._has_failed():  # no loop of ours goes on here
            self.restore()
            signal.raise_signal(number)
            return
        self.is_signalled = True
        # A signal to the whole process group also ends the workers of a DataLoader, whose handler
        # would raise an error wherever this thread is.
        if callable(of_children := signal.getsignal(signal.SIGCHLD)):
            self._before[signal.SIGCHLD] = of_children
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def checked_signals(stop_on: Any) -> list[signal.Signals]:
    """Return the signals of ``batches(stop_on=…)``, in order.

    Raises:
        TypeError: it is no collection of signals.
        ValueError: one that no program can handle.
        RuntimeError: this is not the main thread.
    """
    if not isinstance(stop_on, (tuple, list, set, frozenset)) or not all(
        isinstance(number, int) and number in _ALL and not isinstance(number, bool)
        for number in stop_on
    ):
        raise TypeError(
            f"stop_on is {stop_on!r}, but must be a tuple of signals, such as (signal.SIGTERM,)"
        )
    numbers = sorted(map(signal.Signals, set(stop_on)))
    for number in numbers:
        if number in _NEVER:
            raise ValueError(
                f"stop_on has {number.name}, on which a loop cannot end: use signal.SIGTERM or "
                "signal.SIGINT"
            )
    if numbers and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"batches(…, stop_on=…) was called in thread {threading.current_thread().name!r}, but "
            "Python handles signals in the main thread only: call it there"
        )
    return numbers
