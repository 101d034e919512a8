"""A non-blocking socket to one peer: sends and receives whole frames, and shows the peer's end.

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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from procpipe.channel.sockets import open_process

#: Takes a frame: sequence number, type, flags, body (writable, valid only during the call).
Taker = Callable[[int, int, int, memoryview], None]

_HEADER = struct.Struct("<QIBB")

READ_BYTES = 1 << 18  # at a time
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
                read = self.sock.recv(READ_BYTES)
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
