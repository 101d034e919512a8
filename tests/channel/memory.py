"""A channel inside one process: both ends in one object.

Tensors that are dense in memory are not copied. ``take`` waits for a sender in another thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from procpipe.channel.meta import dense
from procpipe.errors import WaitTimeoutError
from procpipe.tree import Flat


class MemoryChannel:
    """A FIFO of messages; sender and receiver at once.

    Args:
        what: the channel in words, for errors.
        timeout_s: how long ``take`` and ``settle`` may wait.
    """

    def __init__(self, what: str = "a message", timeout_s: float = 60.0) -> None:
        self.num_bytes = 0
        self.num_messages = 0
        self._what = what
        self._timeout_s = timeout_s
        self._num_allowed = 0
        self._messages: deque[Flat] = deque()
        self._changed = threading.Condition()

    def send(self, message: Flat) -> None:
        """Append a message."""
        tensors = [dense(tensor) for tensor in message.tensors]
        with self._changed:
            self._messages.append(Flat(tensors, *message[1:]))
            self.num_messages += 1
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
            self._changed.notify_all()

    def reap(self) -> int:
        """Return 0: the sender holds no messages."""
        return 0

    def settle(self) -> None:
        """Wait until all messages are taken."""
        self._wait_until(lambda: not self._messages, "to be taken")

    def wait_reusable(self) -> None:
        """Return: the receiver has the same tensors, which must never be written to."""

    def expect(self) -> None:
        """Allow one more message to be taken."""
        self._num_allowed += 1

    def forgo(self) -> None:
        """Undo one ``expect``: that message will not be sent."""
        self._num_allowed -= 1

    def take(self) -> Flat:
        """Wait for the next message in order and return it."""
        assert self._num_allowed, "a message is taken that was never expected"
        self._num_allowed -= 1
        self._wait_until(lambda: bool(self._messages), "to come")
        with self._changed:
            message = self._messages.popleft()
            self._changed.notify_all()
        return message

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(ready, self._timeout_s):
                raise WaitTimeoutError(
                    f"waited {self._timeout_s:.1f} s for {self._what} {what} in this process"
                )
