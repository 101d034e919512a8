"""The channel protocol: what every transport offers to the executor.

A channel is an independent FIFO of messages of one kind (activation, gradient, skip, …) from one
stage to one other. Its two ends live in different processes:

    sender                                     receiver
    send(flat)  ── never blocks ──>            expect()    a buffer for one more may be posted
    settle()    waits until taken over         take()      waits for the next message

A message is a ``Flat``: all tensors of one hop, with their structure and which of them want a
gradient back. Shapes, dtypes and structure may differ from message to message.

Transports: ``memory`` (one process), ``shm`` (CPUs of one host), ``gloo`` (CPUs), ``nccl``
(different GPUs), ``cuda_ipc`` (one GPU). One conformance suite, ``tests/channel``, runs over all of
them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from procpipe.channel.meta import Meta
from procpipe.tree import Flat


class Sender(Protocol):
    """The sending end of a channel."""

    num_bytes: int
    """Bytes of tensor elements sent so far."""
    num_messages: int

    def send(self, message: Flat) -> None:
        """Send a message without waiting for anybody; the tensors must not change any more."""

    def reap(self) -> int:
        """Let go of messages that have arrived; return how many are still under way."""

    def settle(self) -> None:
        """Wait until the receiver has all that was sent, so that nothing is under way."""

    def wait_reusable(self) -> None:
        """Wait until what was sent may be written to; on a GPU, let the current stream wait."""


class Receiver(Protocol):
    """The receiving end of a channel."""

    def expect(self) -> None:
        """Allow a buffer for one more message: its transfer may begin from here on."""

    def forgo(self) -> None:
        """Take one allowance back: that message will not be sent."""

    def take(self) -> Flat:
        """Wait for the next message in order and return it.

        Raises:
            RemoteStageError: a peer failed or was lost.
            WaitTimeoutError: nothing came within the timeout.
        """


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return once the tensors may be used (received) or reused (sent).

        On a GPU "may be used" means by work queued on the current stream; the host goes on.
        """

    def is_done(self) -> bool:
        """Tell, without waiting, whether a send is surely over; False when in doubt."""


class Transport(Protocol):
    """How tensors too large to travel inside a token get from one process to another.

    Both ends call in the same order a channel; the receiver knows from the token what comes.
    """

    needs_acknowledgement: bool
    """Whether a sender learns only from the receiver that its tensors have arrived."""

    blocks: bool
    """Whether waiting for a received message blocks this process in native code."""

    copies_at_once: bool
    """Whether what is sent may be written to as soon as ``post_send`` returns."""

    max_posted: int
    """How many receives of one channel may be posted at a time."""

    inline_bytes: int
    """Messages of CPU tensors up to this size travel inside their token instead."""

    def post_send(self, tensors: list[Tensor], peer: int, kind: int) -> tuple[Pending, bytes]:
        """Begin to send; returns at once, with what the token is to tell the receiver."""

    def post_receive(
        self, meta: Meta, peer: int, kind: int, note: bytes
    ) -> tuple[list[Tensor], Pending]:
        """Find memory for the tensors of a message and begin to fill it; returns at once.

        Args:
            meta: what comes.
            peer: from whom.
            kind: on which channel.
            note: what the sender's ``post_send`` had to tell.
        """

    def drain(self) -> None:
        """Wait until no transfer is under way on this rank's device; before a good close."""

    def close(self) -> None:
        """Let go of everything that is shared with other processes."""


class DeviceTransfers(Protocol):
    """Transfers that a device does, so that a dead peer holds up the device."""

    def busy_with(self) -> list[int]:
        """Return the ranks with which transfers are not over; may be asked by any thread."""

    def abort(self) -> bool:
        """End all transfers, at whatever stage they are; may be called by any thread.

        Returns:
            Whether the device is free of them, once it has run the compute that was queued, or
            after half a minute.
        """


class DeviceTransport(Transport, DeviceTransfers, Protocol):
    """A transport between GPUs."""
