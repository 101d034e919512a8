"""What a transport must do: carry tensors that are too large to travel inside a token.

Transports: ``shm`` (CPUs of one host), ``nccl`` (different GPUs), ``cuda_ipc`` (ranks on one GPU).
``link.py`` builds channels on them, and without one between CPUs of several hosts.
``tests/channel/conformance.py`` runs the same cases over each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from procpipe.channel.meta import Meta

#: Returns once sent tensors may be reused, or received ones used. On a GPU that holds for work
#: queued on the current stream from now on; the host goes on.
Wait = Callable[[], object]


class Sending(NamedTuple):
    """A send under way."""

    wait: Wait
    #: Returns, without waiting, whether the receiver surely has it all; False when in doubt.
    is_done: Callable[[], bool]


class Transport(Protocol):
    """Moves tensors between two processes.

    Both ends call in the same order for all channels from one to the other; only a receive that was
    allowed for an earlier message (``Receiver.forgo``) may be posted before its turn.
    """

    holds_device: bool
    """Whether a send holds the sender's device until its receive is posted."""

    inline_bytes: int
    """Messages up to this size travel inside their token, and arrive on the CPU; -1 for none."""

    def post_send(
        self, tensors: list[Tensor], peer: int, channel_id: int
    ) -> tuple[Sending | None, bytes]:
        """Begin to send, without waiting; None if the tensors may be overwritten at once.

        Each tensor's elements are one behind the other in memory, in whatever order. The token
        carries the returned note to the receiver.
        """

    def post_receive(
        self, meta: Meta, peer: int, channel_id: int, note: bytes
    ) -> tuple[list[Tensor], Wait]:
        """Allocate the tensors of a message and begin to fill them, without waiting.

        ``note`` is what the sender's ``post_send`` returned.
        """

    def close(self) -> None:
        """Release what is shared with other processes; after a failure, what no device may use."""


class DeviceTransfers(ABC):
    """Transfers that a device performs, so that a dead peer blocks the device.

    Counts what is under way without asking the device, for a thread that must not call CUDA: to
    query a device from another thread than the one that uses it can hang while that one waits for
    it, and breaks what it captures as a graph (https://github.com/pytorch/pytorch/issues/104487).
    So the main thread notes what it has begun, and, as it begins more, what it sees done.

    They are kept by the ranks that take part. Those of the same ranks mostly end in order.
    """

    def __init__(self) -> None:
        self._begun: defaultdict[tuple[int, ...], deque[Callable[[], bool]]] = defaultdict(deque)

    @abstractmethod
    def drain(self) -> None:
        """Wait until no transfer is under way on this rank's device; called before ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Release what is shared with other processes.

        Without ``drain`` before, as after a failure, only what no device may still use.
        """

    def queued_with(self) -> set[int]:
        """Return the ranks with which transfers may be under way; safe in any thread.

        Those that the main thread has begun and not seen done; perhaps this one, too.
        """
        return {rank for ranks, begun in tuple(self._begun.items()) if begun for rank in ranks}

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
