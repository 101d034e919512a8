"""What a stage holds between tasks, and the count of its bytes.

The count is by the stage's program, not by the clock: a received message counts from the step
that allows its buffer, whether it arrives at once or late. So the peak is the most the stage can
hold whatever the timing, and equals what ``planner.simulate`` predicts from sizes alone:

    Receive activation i+1    + message           (the tensor that waits)
    Run F(i)                  + output            (a root of the backward pass)
    Run B(i)                  - input, - output, - gradient

It counts the tensors that travel or wait between tasks. What autograd saves inside the layers
depends on the layers, and is not counted. What a backward in two tasks puts off from I to W is not
counted either; a partition's input may be part of it, and counts until I.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor


class Ledger:
    """The bytes a stage holds, by key, in program order, with the peak since ``reset_peak``.

    A buffer is allowed before its size is known (``hold`` with no bytes), sized when its message
    comes (``size``) and dropped with ``release``; ``settle`` replays the events of one step once
    every size is known. This costs a few list appends per task.

    Attributes:
        peak_bytes: the most that was held since ``reset_peak``, or at all.
        held_bytes: held after the last ``settle``: 0 between mini-batches, or something leaks.
        sizes: the bytes of all that was held since the last ``settle``, or still is, by key.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.held_bytes = 0
        self.sizes: dict[Any, int] = {}
        self._events: list[tuple[bool, Hashable]] = []

    def hold(self, key: Hashable, size_bytes: int | None = None) -> None:
        """Count ``key`` from here on; its size may follow."""
        self._events.append((True, key))
        if size_bytes is not None:
            self.sizes[key] = size_bytes

    def size(self, key: Hashable, size_bytes: int) -> None:
        """Say how many bytes a key that is already held takes."""
        self.sizes[key] = size_bytes

    def release(self, key: Hashable) -> None:
        """Count ``key`` no longer."""
        self._events.append((False, key))

    def settle(self) -> None:
        """Work out the peak of the events since the last call; every held key has a size now."""
        sizes, held, peak = self.sizes, self.held_bytes, self.peak_bytes
        for is_hold, key in self._events:
            if is_hold:
                held += sizes[key]
                peak = max(peak, held)
            else:
                held -= sizes.pop(key)
        self.held_bytes, self.peak_bytes = held, peak
        self._events.clear()

    def clear(self) -> None:
        """Forget what is held (a pass that was given up); the peak stays."""
        self.held_bytes = 0
        self.sizes.clear()
        self._events.clear()

    def reset_peak(self) -> None:
        """Reset the peak to what is held now."""
        self.peak_bytes = self.held_bytes

    def bytes_now(self) -> int:
        """Return the bytes held in the middle of a step, as far as their sizes are known."""
        return sum(self.sizes.values())


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the elements of some tensors; ``None`` counts nothing."""
    # Not nbytes, which sparse tensors do not have.
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)
