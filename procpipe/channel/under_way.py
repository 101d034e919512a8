"""Counts what a device has under way, without asking it, for a thread that must not call CUDA.

To query a device from another thread than the one that uses it can hang while that one waits for
it, and breaks what it captures as a graph (https://github.com/pytorch/pytorch/issues/104487). So
the main thread notes what it has begun, and, as it begins more, what it sees done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable


class UnderWay:
    """What was begun with other ranks, and not seen done by the thread that began it."""

    def __init__(self) -> None:
        self._of: defaultdict[tuple[int, ...], deque[Callable[[], bool]]] = defaultdict(deque)

    def add(self, ranks: tuple[int, ...], is_done: Callable[[], bool]) -> None:
        """Note what has begun, and look what is done; ``is_done`` queries the device."""
        self.look(ranks)
        self._of[ranks].append(is_done)

    def look(self, ranks: tuple[int, ...]) -> bool:
        """Look what is done of what was begun with these ranks; return whether all is."""
        begun = self._of[ranks]
        while begun and begun[0]():  # mostly they are done in this order
            begun.popleft()
        return not begun

    def look_at_all(self) -> set[int]:
        """Look what is done; return the ranks with which something is under way."""
        for ranks in tuple(self._of):
            self.look(ranks)
        return self.ranks()

    def clear(self) -> None:
        """Note that all is done."""
        for begun in self._of.values():
            begun.clear()

    def ranks(self) -> set[int]:
        """Return the ranks with which something may be under way; safe in any thread."""
        return {rank for ranks, begun in tuple(self._of.items()) if begun for rank in ranks}
