"""Delays signal handlers during operations that must not be interrupted.

Python runs the handler of a signal in the main thread between any two of its instructions, and a
handler may raise: that of Ctrl-C does, and the one by which a DataLoader notices a killed worker.
Sending a failure to the other ranks must not stop halfway.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def put_off() -> Iterator[None]:
    """Run no Python signal handler in the block; handlers of signals that came run at its end.

    May raise what a handler raises, before the block and after it. A signal mask would not be
    enough: the system delivers a signal to any thread that accepts it, and its handler still runs
    in the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    came: set[int] = set()

    def note(number: int, frame: FrameType | None) -> None:
        came.add(number)

    handlers: dict[int, Any] = {}
    try:
        for number in map(int, signal.valid_signals()):
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, note)
        yield
    finally:
        try:
            _restore(handlers)
        finally:
            _raise_all(came)


def _restore(handlers: dict[int, Any]) -> None:
    """Set all handlers again, even if one of them raises meanwhile."""
    try:
        while handlers:
            number = next(iter(handlers))
            signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:
            _restore(handlers)


def _raise_all(numbers: set[int]) -> None:
    """Run the handlers of all signals, even if one of them raises."""
    try:
        while numbers:
            signal.raise_signal(numbers.pop())
    finally:
        if numbers:
            _raise_all(numbers)
