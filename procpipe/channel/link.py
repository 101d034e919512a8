"""Channels between processes: FIFOs of messages, each a token and tensors inside it or behind it.

    sender                                        receiver
    send  ── token [metadata if new | tensors] ──>  tensors are there at once       (small, CPU)
    send  ── token [metadata if new | note] ───>  post a receive of the right size
          ══ tensors by the transport ═════════>                                    (large, GPU)
          <── acknowledgement ─────────────────  received (transports that ask for it)

A message is a ``Flat``: all tensors of one hop, with their structure. Shapes, dtypes and structure
may differ from message to message. From the token the receiver knows the size of its buffers in
time on every transport, without waiting for the device. Up to the transport's ``inline_bytes`` the
tensors travel inside it: one system call at each end, no rendezvous. Without a transport all do,
but a large message follows its token in pieces, so that neither end holds a copy of it.

A receiver reads tokens whenever its process polls or waits. It posts a large receive as soon as
the token is there and the program allows a buffer (``expect``).
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from procpipe.channel.base import Sending, Transport, Wait
from procpipe.channel.mesh import Mesh
from procpipe.channel.meta import Meta, allocate, decode, describe, encode
from procpipe.errors import BoundaryError, FileLimitError, OverwrittenError
from procpipe.tree import Flat, is_plain

#: Up to this size a message of CPU tensors is faster inside its token than through gloo.
INLINE_BYTES = 1 << 16

_HAS_META = 1
_HAS_TENSORS = 2
_COMES_IN_PIECES = 4
_IS_PIECE = 8  # no token, but the next bytes of the message whose token was the last
_ACKNOWLEDGES = 64  # added to a channel id: frame type of its acknowledgements
_IS_POSTED = 128  # the same, for receives that the receiver has posted
_META_SIZE = struct.Struct("<Q")

#: Without a transport a larger message follows its token, in pieces of at most this many bytes.
PIECE_BYTES = 1 << 22

#: How often to check whether a transport without acknowledgements is done; and for how long after
#: the peer has left, whose device may complete a transfer before this rank's does.
_LOOK_EVERY_S = 0.001
_GRACE_S = 2.0


class Sender:
    """The sending end of a channel between two processes.

    ``channel_id`` is the same at both ends, and below 64. ``transport`` carries large tensors; None
    if all travel inside tokens. ``what`` names the channel in errors: "activation to stage 1 (rank
    1)". ``num_bytes`` counts the bytes of tensor elements sent so far, ``num_messages`` messages.
    """

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        channel_id: int,
        transport: Transport | None,
        device: torch.device,
        what: str = "a message",
    ) -> None:
        self.num_bytes = 0
        self.num_messages = 0
        self._mesh = mesh
        self._peer = peer
        self._channel_id = channel_id
        self._transport = transport
        self._inline_bytes: float = math.inf
        if transport is not None:
            self._inline_bytes = transport.inline_bytes if device.type == "cpu" else -1
        self._is_acknowledged = transport is None or transport.needs_acknowledgement
        self._meta: Meta | None = None
        self._structure_text = ""
        self._size_bytes = 0
        self._what = what
        self._in_flight: deque[_Departure] = deque()
        self._num_acknowledged = 0
        #: Whether a send holds this rank's device until its receive is posted.
        self.holds_device = transport is not None and transport.holds_device
        self._num_unposted = 0
        mesh.on(peer, channel_id + _ACKNOWLEDGES, self._on_acknowledgement)
        mesh.on(peer, channel_id + _IS_POSTED, self._on_posted)

    def send(self, message: Flat) -> None:
        """Send a message; its tensors must not change any more.

        Does not block, except that in pieces it waits until the receiver's process reads.
        """
        self._check_plain(message)
        meta = describe(message)
        flags = 0
        parts: list[Any] = []
        # Compare texts, too: 1 == True == 1.0 and 0.0 == -0.0, but exactly these must arrive.
        if meta != self._meta or repr(meta.structure) != self._structure_text:
            encoded = encode(meta)
            flags = _HAS_META
            parts = [_META_SIZE.pack(len(encoded)), encoded]
            self._meta, self._size_bytes = meta, meta.num_bytes
            self._structure_text = repr(meta.structure)
        tensors = [_dense(tensor) for tensor in message.tensors]
        transport = self._transport
        if transport is None and self._size_bytes > PIECE_BYTES:
            flags |= _COMES_IN_PIECES
        elif transport is None or self._size_bytes <= self._inline_bytes:
            flags |= _HAS_TENSORS
            parts += [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        else:
            parts.append(self._post(transport, tensors))
        self._mesh.send(self._peer, self._channel_id, flags, self.num_messages & 0xFFFFFFFF, *parts)
        if flags & _COMES_IN_PIECES:
            self._send_pieces(tensors)
        self.num_messages += 1
        self.num_bytes += self._size_bytes

    def _send_pieces(self, tensors: list[Tensor]) -> None:
        mesh, peer, name = self._mesh, self._peer, self._mesh.ranks[self._peer]
        for data in map(_view_of, tensors):
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                mesh.send(peer, self._channel_id, _IS_PIECE, 0, piece)
                mesh.wait(
                    lambda: not mesh.has_unsent(peer),
                    lambda: f"rank {name} to read a value",
                    peer=peer,
                )

    def _post(self, transport: Transport, tensors: list[Tensor]) -> bytes:
        """Pass tensors to the transport; return its note for the receiver."""
        self._mesh.check_process()
        self.reap()
        try:
            pending, note = transport.post_send(tensors, self._peer, self._channel_id)
        except RuntimeError:
            self._mesh.wait_failure()
            raise
        self._num_unposted += self.holds_device
        if not transport.copies_at_once:
            self._in_flight.append(_Departure(tensors, _versions(tensors), pending))
        elif not pending.is_done():
            self._in_flight.append(_Departure([], None, pending))
        return note

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
            lambda: f"rank {mesh.ranks[peer]} to take over {len(self._in_flight)} messages",
            peer=peer,
            every_s=math.inf if self._is_acknowledged else _LOOK_EVERY_S,
            grace_s=0.0 if self._is_acknowledged else _GRACE_S,
        )

    def reap(self) -> int:
        """Release messages that have arrived; return how many are still under way."""
        in_flight = self._in_flight
        while in_flight and (self._num_acknowledged or in_flight[0].pending.is_done()):
            if self._num_acknowledged:
                self._num_acknowledged -= 1
            departure = in_flight.popleft()
            departure.pending.wait()
            self._check_unwritten(departure)
        return len(in_flight)

    def wait_reusable(self) -> None:
        """Wait until sent tensors may be overwritten; on a GPU, make the current stream wait."""
        if not self._in_flight:
            return
        if self._is_acknowledged:
            self.settle()
        else:
            for k, departure in enumerate(self._in_flight):
                departure.pending.wait()
                self._check_unwritten(departure)
                # What is queued on the stream from here on may write to them.
                self._in_flight[k] = departure._replace(versions=None)

    def _check_plain(self, message: Flat) -> None:
        for tensor in message.tensors:
            if not is_plain(tensor):
                cls = type(tensor)
                raise BoundaryError(
                    f"a {cls.__module__}.{cls.__qualname__} of {tensor.dtype} in {self._what} "
                    "would arrive as a plain tensor: give plain tensors "
                    "(x.as_subclass(torch.Tensor), x.dequantize())"
                )

    def _check_unwritten(self, departure: _Departure) -> None:
        if departure.versions not in (None, _versions(departure.tensors)):
            raise OverwrittenError(
                f"a tensor of {self._what} was written to while it was being sent, so the receiver "
                "may have got a mixture: return memory that nothing writes to again "
                "(buffer.clone() for a buffer that each forward fills)"
            )

    def _on_posted(self, sequence: int, flags: int, body: memoryview) -> None:
        self._num_unposted -= 1

    def _on_acknowledgement(self, sequence: int, flags: int, body: memoryview) -> None:
        self._num_acknowledged += 1
        self.reap()  # at once: the next message may be a mini-batch away


class _Departure(NamedTuple):
    """A message that the transport is sending."""

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
        self._blocks = transport is not None and transport.blocks
        self._what = what
        self._meta: Meta | None = None
        self._num_tokens = 0
        self._num_pieces = 0
        self._num_allowed = 0
        self._num_receiving = 0
        #: Of each token that has come: tensors, or None and the note of the transport's other end.
        self._arrived: deque[tuple[Meta, list[Tensor] | None, bytes]] = deque()
        self._unfilled: deque[memoryview] = deque()  # of a message in pieces
        self._posted: deque[tuple[Meta, list[Tensor], Wait | None]] = deque()
        mesh.on(peer, channel_id, self._on_token)

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
            while not posted:
                num_pieces = self._num_pieces  # each is progress, and the wait begins anew
                self._mesh.wait(
                    lambda seen=num_pieces: posted or self._num_pieces > seen,  # type: ignore[misc]
                    lambda: self._what,
                    peer=self._peer,
                )
        meta, tensors, wait = posted.popleft()
        if wait is not None:
            self._mesh.check_process()
            try:
                if self._blocks:
                    with self._mesh.native_waits.monitored(self._what):
                        wait()
                else:
                    wait()
            except FileLimitError:
                raise
            except (OSError, RuntimeError):  # the peer is gone; its own failure says why
                self._mesh.wait_failure()
                raise
            assert self._transport is not None
            if self._transport.needs_acknowledgement:
                self._mesh.send(self._peer, self._channel_id + _ACKNOWLEDGES, 0, 0)
            self._num_receiving -= 1
            self._post()
        message = Flat(tensors, meta.structure, meta.requires_grad)
        return message.sharing(meta.memories, meta.changes)

    def _on_token(self, sequence: int, flags: int, body: memoryview) -> None:
        if flags & _IS_PIECE:
            self._on_piece(body)
            return
        assert sequence == self._num_tokens & 0xFFFFFFFF, "a channel's tokens come in order"
        self._num_tokens += 1
        start = 0
        if flags & _HAS_META:
            (size,) = _META_SIZE.unpack_from(body)
            start = _META_SIZE.size + size
            self._meta = decode(bytes(body[_META_SIZE.size : start]))
        assert self._meta is not None, "the first token of a channel carries metadata"
        if flags & _COMES_IN_PIECES:
            tensors = allocate(self._meta, "cpu")
            self._unfilled.extend(filter(len, map(_view_of, tensors)))
            self._arrived.append((self._meta, tensors, b""))
        elif flags & _HAS_TENSORS:
            self._arrived.append((self._meta, _tensors_from(body[start:], self._meta), b""))
        else:
            self._arrived.append((self._meta, None, bytes(body[start:])))
        self._post()

    def _on_piece(self, body: memoryview) -> None:
        """Fill the next bytes of the last message; a piece belongs to one tensor."""
        self._num_pieces += 1
        rest = self._unfilled.popleft()
        rest[: len(body)] = body
        if len(rest) > len(body):
            self._unfilled.appendleft(rest[len(body) :])
        self._post()

    def _post(self) -> None:
        """Post receives for the tokens that came, as far as program and transport allow."""
        while self._arrived and self._num_allowed:
            if self._unfilled and len(self._arrived) == 1:
                return
            meta, tensors, note = self._arrived[0]
            if tensors is not None:
                self._posted.append((meta, tensors, None))
            else:
                assert self._transport is not None, "without a transport all is inside tokens"
                if self._num_receiving == self._transport.max_posted:
                    return
                self._num_receiving += 1
                try:
                    posted = self._transport.post_receive(meta, self._peer, self._channel_id, note)
                except (OSError, RuntimeError) as error:
                    posted = [], partial(_fail, error)
                else:
                    if self._transport.holds_device:
                        self._mesh.send(self._peer, self._channel_id + _IS_POSTED, 0, 0)
                self._posted.append((meta, *posted))
            self._arrived.popleft()
            self._num_allowed -= 1


def _fail(error: OSError | RuntimeError) -> None:
    """Raise the error of a transfer that could not begin, when it is waited for."""
    raise error


def _versions(tensors: list[Tensor]) -> list[int | None]:
    """Return each tensor's version, which rises when it is written to."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous, with lazy conjugation and negation resolved."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _bytes_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _view_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as a view that does not keep it alive."""
    return memoryview(_bytes_of(tensor)).cast("B") if tensor.numel() else memoryview(b"")


def _tensors_from(body: memoryview, meta: Meta) -> list[Tensor]:
    assert len(body) == meta.num_bytes, "a token carries what its metadata says"
    tensors = allocate(meta, "cpu")
    if len(body):
        address = ctypes.addressof(ctypes.c_char.from_buffer(body))
        for tensor in tensors:
            ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
            address += tensor.nbytes
    return tensors
