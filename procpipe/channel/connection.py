"""Non-blocking sockets to peers: send and receive whole frames, and show the peers' ends.

Frames are

    body length, sequence number, frame type, flags | body

What the socket does not take at once is copied and sent later; of a frame whose sender keeps its
parts, only referred to. What is read is passed on frame by frame, or, by ``look_ahead``, kept for
the next reading. A frame that does not come as a whole is read into memory of its size, which its
taker may choose (``Placer``).

The end of a process on this host also shows on a descriptor of it (pidfd), since its sockets stay
open while a child that native code forked has them. Only one thread at a time may use this.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from procpipe.channel.sockets import open_process

#: Takes a frame: sequence number, type, flags, body (writable, valid only during the call).
Taker = Callable[[int, int, int, memoryview], None]

#: Chooses where a body is read: frame type, flags, number of bytes; None for new memory.
Placer = Callable[[int, int, int], memoryview | None]

_HEADER = struct.Struct("<QIBB")

_READ_BYTES = 1 << 18  # at a time
_MAX_AHEAD_BYTES = 1 << 20

#: Buffers that one ``sendmsg`` takes at most (IOV_MAX).
_MAX_PARTS = 1024

#: The system takes a frame of up to this size as a whole or not at all.
_WHOLE_BYTES = 4096


class Connection:
    """A connected, non-blocking socket; ``take`` is called with each frame that arrives.

    Attributes:
        process: a descriptor of the peer's process; None where it cannot be opened.
        is_torn: whether a frame may have been sent in part, so that no other can follow.
        has_ended: whether all that the peer has sent was passed on, and no more will come.
    """

    def __init__(self, sock: socket.socket, take: Taker, place: Placer, buffer: memoryview) -> None:
        self.sock = sock
        self.process = open_process(sock)
        self.is_torn = self.has_ended = False
        self._take = take
        self._place = place
        self._buffer = buffer
        self._ahead = bytearray()  # what ``look_ahead`` has read
        self._begun = b""  # the beginning of a header
        self._body: _Body | None = None
        self._unsent: deque[list[memoryview]] = deque()  # of each frame
        self._is_first_begun = False

    @property
    def descriptors(self) -> list[int]:
        """The descriptors on which to poll: the socket's and the process's."""
        return [self.sock.fileno(), *([] if self.process is None else [self.process])]

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this host."""
        return self.sock.family == socket.AF_UNIX

    @property
    def has_unsent(self) -> bool:
        """Whether data waits until the socket can take more."""
        return bool(self._unsent)

    def send(
        self, frame_type: int, flags: int, sequence: int, parts: Sequence[Any], *, keep: bool
    ) -> None:
        """Send a frame; unless they are kept, the parts (byte buffers) may be reused at once."""
        size = sum(len(part) for part in parts)
        frame = [_HEADER.pack(size, sequence, frame_type, flags), *parts]
        if len(frame) > _MAX_PARTS:
            frame = [b"".join(frame)]
        sent = 0
        if not self._unsent:
            try:
                sent = self.sock.sendmsg(frame)
            except BlockingIOError:
                pass
            except OSError:  # reading shows what has happened
                return
            except BaseException:  # raised by a signal handler: how much was sent is unknown
                if size > _WHOLE_BYTES:
                    self.is_torn = True
                raise
        if sent < _HEADER.size + size:
            self._is_first_begun |= sent > 0
            views = [memoryview(part) for part in (frame if keep else [b"".join(frame)])]
            self._unsent.append(_after(sent, views))

    def send_on(self) -> None:
        """Send queued data, as much as the socket accepts."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self.sock.sendmsg(unsent[0])
                unsent[0] = _after(sent, unsent[0])
                self._is_first_begun = bool(unsent[0])
                if not unsent[0]:
                    unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            unsent.clear()
        except BaseException:
            self.is_torn = True
            raise

    def drop_unsent(self, *, but_begun: bool = False) -> None:
        """Drop what waits to be sent; ``but_begun`` keeps a frame that was sent in part."""
        while len(self._unsent) > (but_begun and self._is_first_begun):
            self._unsent.pop()

    def read(self) -> bool:
        """Read once and pass whole frames on; return whether there may be more."""
        body = self._body if not self._ahead else None
        room = [self._buffer] if body is None else [body.rest, self._buffer]
        try:
            num_read = self.sock.recvmsg_into(room)[0]
        except BlockingIOError:
            return False
        except OSError:
            num_read = 0
        if num_read == 0:
            self.has_ended = True
            return False
        if body is not None:
            num_filled = min(num_read, len(body.rest))
            num_read -= num_filled
            self._filled(body, num_filled)
        if self._ahead:
            self._ahead += self._buffer[:num_read]
            self.hand_on()
        else:
            self._hand_on(self._buffer[:num_read])
        return True

    def hand_on(self) -> None:
        """Pass on the whole frames that ``look_ahead`` has read."""
        data, self._ahead = self._ahead, bytearray()
        self._hand_on(memoryview(data))

    def _hand_on(self, data: memoryview) -> None:
        if self._body is not None:
            some = data[: len(self._body.rest)]
            self._body.rest[: len(some)] = some
            self._filled(self._body, len(some))
            data = data[len(some) :]
        if self._begun:
            data = memoryview(self._begun + bytes(data))
        taken = _whole_frames(data, self._take)
        if len(data) - taken < _HEADER.size:
            self._begun = bytes(data[taken:])
            return
        self._begun = b""
        size, sequence, frame_type, flags = _HEADER.unpack_from(data, taken)
        memory = self._place(frame_type, flags, size) or memoryview(bytearray(size))
        some = data[taken + _HEADER.size :]
        memory[: len(some)] = some
        self._body = _Body(sequence, frame_type, flags, memory, memory[len(some) :])

    def _filled(self, body: _Body, num_bytes: int) -> None:
        """Note that so much more of a body has come; pass its frame on if that is all."""
        body.rest = body.rest[num_bytes:]
        if not body.rest:
            self._body = None
            self._take(body.sequence, body.frame_type, body.flags, body.memory)

    def look_ahead(self) -> tuple[list[tuple[int, bytes]], bool]:
        """Read without passing on; return type and body of each frame, and if it ended."""
        data = self._ahead
        has_ended = self._has_process_ended()
        while len(data) < _MAX_AHEAD_BYTES:
            try:
                read = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                read = b""
            if not read:
                has_ended = True
                break
            data += read
        frames: list[tuple[int, bytes]] = []
        rest = len(self._body.rest) if self._body is not None else 0
        known = memoryview(self._begun + bytes(data[rest:]))
        _whole_frames(known, lambda _, of, __, body: frames.append((of, bytes(body))))
        return frames, has_ended

    def _has_process_ended(self) -> bool:
        if self.process is None:
            return False
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptors."""
        self.sock.close()
        if self.process is not None:
            os.close(self.process)
            self.process = None
        self._unsent.clear()


@dataclass
class _Body:
    """A frame that has come in part."""

    sequence: int
    frame_type: int
    flags: int
    memory: memoryview
    rest: memoryview  # of the memory, still to be filled


class Connections:
    """Connections by peer; ``take`` is called with the peer of a frame and what it consists of.

    ``place`` is called with the peer, and as ``Placer``.

    ``ended`` is called with each peer that has ended, and whether it was on this host.

    Attributes:
        of: the connection to each peer that has not ended.
        is_closed: whether this rank has closed them.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        take: Callable[[int, int, int, int, memoryview], None],
        place: Callable[[int, int, int, int], memoryview | None],
        ended: Callable[[int, bool], None],
    ) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        self.of = {
            k: Connection(sock, partial(take, k), partial(place, k), buffer)
            for k, sock in sockets.items()
        }
        self.is_closed = False
        self._ended = ended
        self._read_ahead: set[int] = set()
        self._peer_of = {d: k for k, connection in self.of.items() for d in connection.descriptors}
        self._poller = select.poll()
        for descriptor in self._peer_of:
            self._poller.register(descriptor, select.POLLIN)

    @property
    def busy(self) -> list[int]:
        """The peers for which data waits until their sockets can take more."""
        return [peer for peer, connection in self.of.items() if connection.has_unsent]

    def send(
        self,
        peer: int,
        frame_type: int,
        flags: int,
        sequence: int,
        parts: Sequence[Any],
        *,
        keep: bool = False,
    ) -> None:
        """Send a frame; never blocks. See ``Mesh.send``."""
        connection = self.of[peer]
        connection.send(frame_type, flags, sequence, parts, keep=keep)
        if connection.has_unsent:
            self._poller.modify(connection.sock, select.POLLIN | select.POLLOUT)

    def read_and_write(self, timeout_s: float) -> None:
        """Read and send what is possible within ``timeout_s``."""
        while self._read_ahead:
            timeout_s = 0.0
            peer = self._read_ahead.pop()
            if peer in self.of:
                self.of[peer].hand_on()
        for descriptor, event in self._poller.poll(max(0.0, timeout_s) * 1000):
            if descriptor not in self._peer_of:  # closed by an event before this one
                continue
            peer = self._peer_of[descriptor]
            if descriptor == self.of[peer].process:
                while self._read(peer):
                    pass
                if peer in self.of:
                    self.end(peer)
                continue
            if event & select.POLLOUT:
                self._send_on(peer)
            if event & ~select.POLLOUT:
                self._read(peer)

    def look_ahead(self) -> Iterator[tuple[int, list[tuple[int, bytes]], bool]]:
        """Yield each peer, type and body of its frames not yet passed on, and whether it ended."""
        for peer, connection in self.of.items():
            frames, has_ended = connection.look_ahead()
            if frames:
                self._read_ahead.add(peer)
            yield peer, frames, has_ended

    def send_rest(self, timeout_s: float) -> None:
        """Wait a limited time until the sockets of peers that run have taken everything."""
        deadline = time.monotonic() + timeout_s
        while busy := self.busy:
            poller = select.poll()
            for peer in busy:
                connection = self.of[peer]
                poller.register(connection.sock, select.POLLOUT)
                if connection.process is not None:
                    poller.register(connection.process, select.POLLIN)
            for descriptor, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                connection = self.of[peer := self._peer_of[descriptor]]
                if descriptor == connection.process:
                    connection.drop_unsent()  # the peer has ended
                elif connection.has_unsent:
                    self._send_on(peer)
            if time.monotonic() > deadline:
                return

    def end(self, peer: int) -> None:
        """Close the connection to a peer that has ended."""
        connection = self.of.pop(peer)
        for descriptor in connection.descriptors:
            self._poller.unregister(descriptor)
            del self._peer_of[descriptor]
        connection.close()
        self._ended(peer, connection.is_local)

    def close(self) -> None:
        """Close all connections."""
        self.is_closed = True
        for connection in self.of.values():
            connection.close()
        self.of.clear()
        self._peer_of.clear()
        self._poller = select.poll()

    def _send_on(self, peer: int) -> None:
        connection = self.of[peer]
        connection.send_on()
        if not connection.has_unsent:
            self._poller.modify(connection.sock, select.POLLIN)

    def _read(self, peer: int) -> bool:
        connection = self.of[peer]
        may_have_more = connection.read()
        if connection.has_ended:
            self.end(peer)
        return may_have_more


def _whole_frames(data: memoryview, take: Taker) -> int:
    """Pass on the whole frames at the beginning of some data; return where they end."""
    position = 0
    while position + _HEADER.size <= len(data):
        size, sequence, frame_type, flags = _HEADER.unpack_from(data, position)
        end = position + _HEADER.size + size
        if end > len(data):
            break
        body = data[position + _HEADER.size : end]
        position = end
        take(sequence, frame_type, flags, body)
    return position


def _after(num_bytes: int, views: Iterable[memoryview]) -> list[memoryview]:
    """Return what follows the first bytes of some buffers."""
    rest = []
    for view in views:
        if num_bytes < view.nbytes:
            rest.append(view.cast("B")[num_bytes:])
        num_bytes = max(0, num_bytes - view.nbytes)
    return rest
