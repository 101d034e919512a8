"""Channels between processes: FIFOs of messages, each a token and tensors inside it or behind it.

    sender                                        receiver
    send  ── token [metadata if new | tensors] ──>  tensors are there       (small, or no transport)
    send  ── token [metadata if new | note] ─────>  post a receive of the right size
          ══ tensors by the transport ═══════════>                                (large, or GPU)

A message is a ``Flat``: all tensors of one hop, with their structure. Shapes, dtypes and structure
may differ from message to message. From the token the receiver knows the size of its buffers in
time on every transport, without waiting for the device. Up to the transport's ``inline_bytes`` the
tensors travel inside it: one system call at each end, no rendezvous.

A receiver reads tokens whenever its process polls or waits. It posts a large receive as soon as
the token is there and the program allows a buffer (``expect``).

Between hosts all tensors travel inside their token, straight out of their memory and into that of
the receiver's, if they are large. A sender sends on while the receiver reads, and reads meanwhile,
too, so two ranks may send to each other. If the receiver is in a task, the sender does not wait for
its end: what the socket did not take is kept by reference, and sent on at the sender's later polls
and waits.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from procpipe.channel.base import Sending, Transport, Wait
from procpipe.channel.frames import READ_BYTES
from procpipe.channel.mesh import Mesh
from procpipe.channel.meta import Meta, block_of, decode, encode, tensors_in
from procpipe.errors import BoundaryError, OverwrittenError
from procpipe.tree import Flat, is_plain, versions_of

#: Without a transport, larger messages are not copied.
INLINE_BYTES = READ_BYTES

_HAS_TENSORS = 1
_IS_POSTED = 64  # added to a channel id: frame type by which the receiver says that it has posted

#: How often to look whether a transport is done, which no socket shows.
_LOOK_EVERY_S = 0.001

#: A peer that has not read for so long is in a task. (A socket may be writable again only once a
#: third of its buffer is free, megabytes.)
_PAUSE_S = 0.01


def send_on(mesh: Mesh, peer: int) -> None:
    """Send a peer what waits for its socket, for as long as it reads."""
    while mesh.has_unsent(peer):
        started = time.monotonic()
        mesh.poll(_PAUSE_S)
        if time.monotonic() - started >= _PAUSE_S:
            return


class Sender:
    """The sending end of a channel between two processes.

    ``channel_id`` is the same at both ends. ``transport`` carries large tensors; None if
    all travel inside their token. ``what`` names the channel in errors: "activation to stage 1
    (rank 1)". ``num_bytes`` counts the bytes of tensor elements sent so far, ``num_messages``
    messages; ``in_flight`` has those that may not have arrived.
    """

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        channel_id: int,
        transport: Transport | None,
        what: str = "a message",
    ) -> None:
        self.num_bytes = 0
        self.num_messages = 0
        self._mesh = mesh
        self._peer = peer
        self._channel_id = channel_id
        self._transport = transport
        self._last: object = None  # what the receiver knows
        self._size_bytes = 0
        self._what = what
        self.in_flight: deque[_Departure] = deque()
        #: Whether a send holds this rank's device until its receive is posted.
        self.holds_device = transport is not None and transport.holds_device
        self._num_unposted = 0
        mesh.on(peer, channel_id + _IS_POSTED, self._on_posted)

    def send(self, message: Flat) -> None:
        """Send a message; its tensors must not change any more.

        Does not wait for the receiver; a large one without a transport is sent while it reads.
        """
        tensors = [self._sendable(tensor) for tensor in message.tensors]
        meta = self._news(message, tensors)
        transport, size = self._transport, self._size_bytes
        if transport is not None and size > transport.inline_bytes:
            note = self._post(transport, tensors)
            self._mesh.send(self._peer, self._channel_id, 0, len(meta), meta, note)
        else:
            is_large, parts = size > INLINE_BYTES, (meta, *block_of(tensors))
            self._mesh.send(
                self._peer, self._channel_id, _HAS_TENSORS, len(meta), *parts, keep=is_large
            )
            if is_large:
                self._keep(tensors, Sending(self._wait_sent, self._is_sent))
                send_on(self._mesh, self._peer)
        self.num_messages += 1
        self.num_bytes += size

    def _news(self, message: Flat, tensors: list[Tensor]) -> bytes:
        """Return the encoded metadata; nothing if it is that of the message before."""
        _, structure, requires_grad = message
        what = (
            [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors],
            structure,
            requires_grad,
        )
        if what == self._last:
            return b""
        self._last, self._size_bytes = what, sum(tensor.nbytes for tensor in tensors)
        return encode(message, tensors)

    def _post(self, transport: Transport, tensors: list[Tensor]) -> bytes:
        """Pass tensors to the transport; return its note for the receiver."""
        self._mesh.check_open()
        try:
            pending, note = transport.post_send(tensors, self._peer, self._channel_id)
        except RuntimeError:
            self._mesh.wait_failure()
            raise
        self._num_unposted += self.holds_device
        if pending is not None:
            self._keep(tensors, pending)
        return note

    def _keep(self, tensors: list[Tensor], pending: Sending) -> None:
        """Keep tensors until they have arrived, and release others that have."""
        self.reap()
        self.in_flight.append(_Departure(tensors, versions_of(tensors), pending))

    def wait_posted(self) -> None:
        """Wait until the receiver has posted what holds this rank's device until then.

        The host waits for the receiver's host, not for a device. Then all that this device has
        queued ends by itself, even if the host waits for it in whatever it does next.
        """
        mesh, peer = self._mesh, self._peer
        mesh.wait(
            lambda: self._num_unposted == 0,
            lambda: f"rank {mesh.ranks[peer]} to receive {self._what}",
            peer=peer,
        )

    def settle(self) -> None:
        """Wait until the receiver has all that was sent, so that nothing is under way."""
        mesh, peer = self._mesh, self._peer
        mesh.wait(
            lambda: self.reap() == 0 and not mesh.has_unsent(peer),
            lambda: f"rank {mesh.ranks[peer]} to take over {len(self.in_flight)} messages",
            peer=peer,
            every_s=_LOOK_EVERY_S,
        )

    def reap(self) -> int:
        """Release messages that have arrived; return how many are still under way."""
        in_flight = self.in_flight
        while in_flight and in_flight[0].pending.is_done():
            departure = in_flight.popleft()
            departure.pending.wait()
            self._check_unwritten(departure)
        return len(in_flight)

    def wait_reusable(self) -> None:
        """Wait until sent tensors may be overwritten; on a GPU, make the current stream wait."""
        for k, departure in enumerate(self.in_flight):
            departure.pending.wait()
            self._check_unwritten(departure)
            # What is queued on the stream from here on may write to them.
            self.in_flight[k] = departure._replace(versions=None)
        self.reap()

    def _wait_sent(self) -> None:
        """Wait until the socket has taken what it takes out of the tensors' own memory."""
        mesh, peer = self._mesh, self._peer
        mesh.wait(self._is_sent, lambda: f"rank {mesh.ranks[peer]} to read a value", peer=peer)

    def _is_sent(self) -> bool:
        return not self._mesh.has_unsent(self._peer)

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Return a tensor with its elements one behind the other in memory, in whatever order.

        Copies it if it is not so already. Lazy conjugation and negation are resolved.
        """
        if not is_plain(tensor):
            cls = type(tensor)
            raise BoundaryError(
                f"a {cls.__module__}.{cls.__qualname__} of {tensor.dtype} in {self._what} "
                "would arrive as a plain tensor: give plain tensors "
                "(x.as_subclass(torch.Tensor), x.dequantize())"
            )
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_contiguous():
            return tensor
        # This takes over the strides of tensors that are dense.
        is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        return tensor if is_dense else tensor.clone()

    def _check_unwritten(self, departure: _Departure) -> None:
        if departure.versions not in (None, versions_of(departure.tensors)):
            raise OverwrittenError(
                f"a tensor of {self._what} was written to while it was being sent, so the receiver "
                "may have got a mixture: return memory that nothing writes to again "
                "(buffer.clone() for a buffer that each forward fills)"
            )

    def _on_posted(self, sequence: int, flags: int, body: memoryview) -> None:
        self._num_unposted -= 1


class _Departure(NamedTuple):
    """A message that is being sent."""

    tensors: list[Tensor]  # kept until it has arrived
    versions: list[int | None] | None  # when it began; None once they may be overwritten
    pending: Sending


class Receiver:
    """The receiving end of a channel between two processes; arguments as for :class:`Sender`."""

    def __init__(
        self, mesh: Mesh, peer: int, channel_id: int, transport: Transport | None, what: str
    ) -> None:
        self._mesh = mesh
        self._peer = peer
        self._channel_id = channel_id
        self._transport = transport
        self._what = what
        self._meta: Meta | None = None
        self._num_allowed = 0
        #: Of each token that has come: tensors, or None and the note of the transport's other end.
        self._arrived: deque[tuple[Meta, list[Tensor] | None, bytes]] = deque()
        self._posted: deque[tuple[Meta, list[Tensor], Wait | None]] = deque()
        mesh.on(peer, channel_id, self._on_frame)

    def expect(self) -> None:
        """Allow a buffer for one more message: its transfer may begin from now on."""
        self._num_allowed += 1
        self._post()

    def forgo(self) -> None:
        """Withdraw one allowance: that message will not be sent."""
        self._num_allowed -= 1

    def take(self) -> Flat:
        """Wait for the next message in order and return it.

        Raises:
            RemoteStageError: a peer failed or was lost.
            WaitTimeoutError: nothing came within the timeout.
        """
        posted = self._posted
        if not posted:
            assert self._num_allowed, "a message is taken that was never expected"
            self._mesh.wait(posted.__len__, lambda: self._what, peer=self._peer)
        meta, tensors, wait = posted.popleft()
        if wait is not None:
            self._mesh.check_open()
            wait()
        return Flat(tensors, meta.structure, meta.requires_grad)

    def _on_frame(self, meta_size: int, flags: int, body: memoryview) -> None:
        if meta_size:
            self._meta = decode(bytes(body[:meta_size]))
        assert self._meta is not None, "the first token of a channel carries metadata"
        rest = body[meta_size:]
        if flags & _HAS_TENSORS:
            if len(body) <= READ_BYTES:  # else it has memory of its own
                rest = memoryview(bytearray(rest))
            self._arrived.append((self._meta, tensors_in(rest, self._meta), b""))
        else:
            self._arrived.append((self._meta, None, bytes(rest)))
        self._post()

    def _post(self) -> None:
        """Post receives for the tokens that came, as far as the program allows."""
        while self._arrived and self._num_allowed:
            meta, tensors, note = self._arrived[0]
            if tensors is not None:
                self._posted.append((meta, tensors, None))
            else:
                assert self._transport is not None, "without a transport all is inside tokens"
                try:
                    posted = self._transport.post_receive(meta, self._peer, self._channel_id, note)
                except (OSError, RuntimeError) as error:
                    posted = [], partial(self._fail, error)
                else:
                    if self._transport.holds_device:
                        self._mesh.send(self._peer, self._channel_id + _IS_POSTED, 0, 0)
                self._posted.append((meta, *posted))
            self._arrived.popleft()
            self._num_allowed -= 1

    def _fail(self, error: OSError | RuntimeError) -> None:
        """Raise the error of a transfer that could not begin, when it is waited for."""
        self._mesh.wait_failure()  # if the peer is gone, its own failure says why
        raise error
