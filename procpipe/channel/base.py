"""What a transport must do: carry tensors that are too large to travel inside a token.

Transports: ``shm`` (CPUs of one host), ``nccl`` (different GPUs), ``cuda_ipc`` (ranks on one GPU).
``link.py`` builds channels on them, and without one between CPUs of several hosts.
``tests/channel/conformance.py`` runs the same cases over each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from procpipe.channel.meta import Meta


class Sending(Protocol):
    """A send under way."""

    def wait(self) -> None:
        """Return once the tensors may be reused.

        On a GPU that holds for work queued on the current stream from now on; the host goes on.
        """

    def is_done(self) -> bool:
        """Return, without waiting, whether the receiver surely has it all; False when in doubt."""


#: Returns once received tensors may be used; as for a send, on a GPU the host goes on.
Wait = Callable[[], object]


class Opened(Protocol):
    """What a rank has open until it leaves."""

    def drain(self) -> None:
        """Wait until no transfer is under way on this rank's device; called before ``close``."""

    def close(self) -> None:
        """Release everything that is shared with other processes.

        Without ``drain`` before, as after a failure, only what no device may still use.
        """


class Transport(Opened, Protocol):
    """Moves tensors between two processes.

    Both ends call in the same order for all channels from one to the other.
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
