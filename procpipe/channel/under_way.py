"""Counts what a device has under way, without asking it, for a thread that must not call CUDA.

To query a device from another thread than the one that uses it can hang while that one waits for
it, and breaks what it captures as a graph (https://github.com/pytorch/pytorch/issues/104487). So
the main thread notes what it has begun, and, as it begins more, what it sees done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from procpipe.channel.base import Opened


class DeviceTransfers(Opened):
    """Transfers that a device performs, so that a dead peer blocks the device.

    They are kept by the ranks that take part. Those of the same ranks mostly end in order.
    """

    def __init__(self) -> None:
        self._begun: defaultdict[tuple[int, ...], deque[Callable[[], bool]]] = defaultdict(deque)

    def queued_with(self) -> list[int]:
        """Return the ranks with which transfers may be under way; safe in any thread.

        Those that the main thread has begun and not seen done.
        """
        return sorted(
            {rank for ranks, begun in tuple(self._begun.items()) if begun for rank in ranks}
        )

    def are_over(self) -> bool:
        """Return, without waiting, whether the device has done all transfers; asks the device."""
        for ranks in tuple(self._begun):
            self._look(ranks)
        return not any(self._begun.values())

    def _add(self, ranks: tuple[int, ...], is_done: Callable[[], bool]) -> None:
        """Note what has begun, and look what is done; ``is_done`` queries the device."""
        self._look(ranks)
        self._begun[ranks].append(is_done)

    def _look(self, ranks: tuple[int, ...]) -> None:
        begun = self._begun[ranks]
        while begun and begun[0]():
            begun.popleft()
