"""Non-blocking sockets to peers: send and receive whole frames, and show the peers' ends.

Frames are

    body length, sequence number, frame type, flags | body

What the socket does not take at once is copied and sent later. What is read is passed on frame by
frame, or, by ``look_ahead``, kept for the next reading.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from procpipe.channel.sockets import open_process

#: Takes a frame: sequence number, type, flags, body (writable, valid only during the call).
Taker = Callable[[int, int, int, memoryview], None]

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

    def __init__(self, sock: socket.socket, take: Taker, buffer: memoryview) -> None:
        self.sock = sock
        self.process = open_process(sock)
        self.is_torn = self.has_ended = False
        self._take = take
        self._buffer = buffer
        self._partial = bytearray()
        self._unsent: deque[memoryview] = deque()

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

    def send(self, frame_type: int, flags: int, sequence: int, parts: Sequence[Any]) -> None:
        """Send a frame; the parts (byte buffers) may be reused at once."""
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
            self._unsent.append(memoryview(b"".join(frame))[sent:])

    def send_on(self) -> None:
        """Send queued data, as much as the socket accepts."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self.sock.send(unsent[0])
                unsent[0] = unsent[0][sent:]
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
        while self._unsent and not (but_begun and _is_begun(self._unsent[-1])):
            self._unsent.pop()

    def read(self) -> bool:
        """Read once and pass whole frames on; return whether there may be more."""
        try:
            num_read = self.sock.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except OSError:
            num_read = 0
        if num_read == 0:
            self.has_ended = True
            return False
        view = self._buffer[:num_read]
        if self._partial:
            self._partial += view
            self.hand_on()
        elif (taken := _hand_on(view, self._take)) < num_read:
            self._partial = bytearray(view[taken:])
        return True

    def hand_on(self) -> None:
        """Pass on the whole frames that have been read."""
        taken = _hand_on(memoryview(self._partial), self._take)
        if taken:
            self._partial = bytearray(memoryview(self._partial)[taken:])

    def look_ahead(self) -> tuple[list[tuple[int, bytes]], bool]:
        """Read without passing on; return type and body of each frame, and if it ended."""
        data = self._partial
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
        _hand_on(memoryview(data), lambda _, of, __, body: frames.append((of, bytes(body))))
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


class Connections:
    """Connections by peer; ``take`` is called with the peer of a frame and what it consists of.

    ``ended`` is called with each peer that has ended, and whether it was on this host.

    Attributes:
        of: the connection to each peer that has not ended.
        is_closed: whether this rank has closed them.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        take: Callable[[int, int, int, int, memoryview], None],
        ended: Callable[[int, bool], None],
    ) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        self.of = {k: Connection(sock, partial(take, k), buffer) for k, sock in sockets.items()}
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
        self, peer: int, frame_type: int, flags: int, sequence: int, parts: Sequence[Any]
    ) -> None:
        """Send a frame; never blocks, and the parts (byte buffers) may be reused at once."""
        connection = self.of[peer]
        connection.send(frame_type, flags, sequence, parts)
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


def _hand_on(data: memoryview, take: Taker) -> int:
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


def _is_begun(unsent: memoryview) -> bool:
    frame = unsent.obj
    assert isinstance(frame, bytes)
    return unsent.nbytes < len(frame)
