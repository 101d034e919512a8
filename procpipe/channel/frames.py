"""A non-blocking socket to a peer that carries frames.

    body length, sequence number, frame type, flags | body

What the socket does not take at once is copied, or kept where that is asked for, and sent later.
What is read is passed on frame by frame; a body that has not come as a whole, as none of more than
``READ_BYTES`` can, is read straight into memory of its own. One thread at a time uses an object.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch

from procpipe.channel.meta import memory_of

#: Takes a frame: sequence number, type, flags, body (writable; valid only during
#: the call, unless it is larger than ``READ_BYTES``).
Taker = Callable[[int, int, int, memoryview], None]

_HEADER = struct.Struct("<QIBB")

#: What a thread reads at a time, by a buffer that all of its sockets share.
READ_BYTES = 1 << 18

#: Buffers that one ``sendmsg`` takes at most (IOV_MAX).
_MAX_PARTS = 1024


class Frames:
    """A connected, non-blocking socket; ``take`` is called with each frame that arrives.

    ``buffer`` is for reading; sockets that one thread uses may share it.

    Attributes:
        sock: the socket.
        unsent: data that waits until the socket can take more.
        has_ended: whether all that the peer has sent was passed on, and no more will come.
    """

    def __init__(self, sock: socket.socket, take: Taker, buffer: memoryview) -> None:
        self.sock = sock
        self.has_ended = False
        self._take = take
        self._buffer = buffer
        self._rest = b""  # the beginning of a header
        self._head = (0, 0, 0)  # of the frame whose body is being read
        self._body: memoryview | None = None  # all of it, and how much has come
        self._filled = 0
        self.unsent: deque[memoryview] = deque()

    def send(
        self,
        frame_type: int,
        flags: int,
        sequence: int,
        parts: Sequence[Any],
        *,
        keep: bool = False,
    ) -> None:
        """Send a frame; never blocks, and the parts (byte buffers) may be reused at once.

        With ``keep`` they may not, until they are sent and no longer referenced.
        """
        size = sum(map(len, parts))
        frame = [_HEADER.pack(size, sequence, frame_type, flags), *parts]
        sent = 0
        if not self.unsent:
            try:
                sent = self.sock.sendmsg(frame[:_MAX_PARTS])
            except BlockingIOError:
                pass
            except OSError:  # reading shows what has happened
                return
        if sent < _HEADER.size + size:
            self.unsent.extend(map(memoryview, frame if keep else [b"".join(frame)]))
            self._drop_sent(sent)

    def send_on(self) -> None:
        """Send queued data, as much as the socket accepts."""
        try:
            while self.unsent:
                self._drop_sent(self.sock.sendmsg(islice(self.unsent, _MAX_PARTS)))
        except BlockingIOError:
            return
        except OSError:
            self.unsent.clear()

    def _drop_sent(self, num_bytes: int) -> None:
        unsent = self.unsent
        while unsent and num_bytes >= len(unsent[0]):
            num_bytes -= len(unsent.popleft())
        if num_bytes:
            unsent[0] = unsent[0][num_bytes:]

    def read(self) -> bool:
        """Read once and pass whole frames on; return whether there may be more."""
        body = self._body
        try:
            num_read = self.sock.recv_into(self._buffer if body is None else body[self._filled :])
        except BlockingIOError:
            return False
        except OSError:
            num_read = 0
        if not num_read:
            self.has_ended = True
            return False
        if body is None:
            data = self._buffer[:num_read]
            if self._rest:
                data, self._rest = memoryview(bytearray(self._rest) + data), b""
            self._pass_on(data)
            return True
        self._filled += num_read
        if self._filled == len(body):
            self._body = None
            self._take(*self._head, body)
        return True

    def end(self) -> None:
        """Send no more; the peer sees that once it has read all."""
        with contextlib.suppress(OSError):  # it has ended itself
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket, and drop what waits to be sent."""
        self.unsent.clear()
        self.sock.close()

    def _pass_on(self, data: memoryview) -> None:
        """Pass on whole frames; make room for the body of one that has not come as a whole."""
        start = 0
        while len(data) - start >= _HEADER.size:
            num_bytes, sequence, frame_type, flags = _HEADER.unpack_from(data, start)
            self._head = sequence, frame_type, flags
            start += _HEADER.size
            part = data[start : start + num_bytes]
            start += len(part)
            if len(part) < num_bytes:
                self._body = memory_of(torch.empty(num_bytes, dtype=torch.uint8))
                self._body[: len(part)] = part
                self._filled = len(part)
                return
            self._take(sequence, frame_type, flags, part)
        self._rest = bytes(data[start:])
