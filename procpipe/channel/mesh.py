"""Framed messages between the ranks of one job, and the one place where a process waits.

One socket joins each pair of ranks and carries everything they say to each other: orders of the
coordinator, tokens and small tensors of channels, failures, farewells. Frames are

    body length, sequence number, kind, flags | body

A process is single-threaded here: frames are read while it waits (``wait``) and between tasks
(``poll``), and handed to whoever registered for their peer and kind. Since every wait is a wait
for sockets, every wait ends when a peer fails or dies: its farewell or the end of its stream wakes
the waiter. Nothing needs a poisoned buffer or a poll of the store; and only for transfers that
block in native code a watching thread (``lookout``), which reports stalls.

    rank 1 raises ── FAILURE ──> all peers: RemoteStageError, passed on once more by each
    rank 1 is killed ── end of stream, or of its process ──> all peers: PeerLostError
    rank 1 ends its script ── GOODBYE ──> no fault, unless somebody then waits for rank 1

The end of a process on this host is seen by a descriptor of it (pidfd), too: its sockets stay open
while a child has them that native code forked. What it had sent before counts first.

While the main thread is in native code, of a device that waits for a transfer for instance, another
may look what it would read (``overheard``), and leaves it all to the main thread.

Writing never blocks: what a socket does not take at once is copied and sent on at later polls.
Knows nothing of tensors or tasks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from procpipe.channel.lookout import Lookout
from procpipe.channel.wire import has_vanished, open_process
from procpipe.errors import (
    PeerLostError,
    ProcpipeError,
    RemoteStageError,
    StageClosedError,
    WaitTimeoutError,
)
from procpipe.forks import give_up_in_children
from procpipe.signals import put_off

__all__ = ["FAILURE", "GOODBYE", "Mesh", "Onlooker"]

#: Handles a frame: sequence number, flags, body (writable, valid only during the call).
Handler = Callable[[int, int, memoryview], None]

GOODBYE = 254
FAILURE = 255

_HEADER = struct.Struct("<QIBB")
_READ_BYTES = 1 << 18

#: Buffers that one ``sendmsg`` takes at most (IOV_MAX); more are an error there.
_MAX_PARTS = 1024

#: How much of a peer's is read ahead of the main thread at most.
_MAX_AHEAD_BYTES = 1 << 20

#: A system takes a frame of up to so many bytes as a whole or not at all.
_WHOLE_BYTES = 4096

#: A wait that lasts longer is told to the onlooker.
_TELL_AFTER_S = 0.05

#: How long a rank that leaves waits for peers that are too busy to read why.
_LAST_WORDS_TIMEOUT_S = 5.0

#: How long a peer whose connection broke elsewhere may take to tell why, or to end.
_STORY_TIMEOUT_S = 2.0


class Onlooker:
    """Is told of the waits of one rank; this one does nothing with it."""

    def start_wait(self, what: str, since_s: float) -> None:
        """Hear what is waited for, and since when (``time.monotonic()``)."""

    def end_wait(self) -> None:
        """Hear that the wait came to a good end."""

    def stalled(self, what: str, waited_s: float) -> None:
        """Hear that the wait has lasted for the stall timeout; again after twice the time."""

    def last_seen(self, peer: int) -> str:
        """Say what a peer was doing when it died, as a sentence, or nothing."""
        return ""


class Mesh:
    """The sockets of one rank.

    Args:
        rank: this rank.
        sockets: a connected, non-blocking socket to each other rank.
        timeout_s: how long a wait may last before it is an error.
        stall_timeout_s: how long until it is called a stall.
        onlooker: is told of waits and stalls.

    Attributes:
        num_looks: how often it was looked at what comes.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        *,
        timeout_s: float,
        stall_timeout_s: float,
        onlooker: Onlooker,
    ) -> None:
        self.rank = rank
        self.num_looks = 0
        self._sockets = dict(sockets)
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._onlooker = onlooker
        self.lookout = Lookout(
            stall_timeout_s, onlooker.start_wait, onlooker.end_wait, onlooker.stalled
        )
        self._handlers: dict[tuple[int, int], Handler] = {}
        self._early: defaultdict[tuple[int, int], list[tuple[int, int, bytearray]]] = defaultdict(
            list
        )
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._partial: dict[int, bytearray] = {peer: bytearray() for peer in sockets}
        self._unsent: dict[int, deque[memoryview]] = {peer: deque() for peer in sockets}
        self._left: set[int] = set()
        self._torn: set[int] = set()
        self._failure: ProcpipeError | None = None
        self._has_told = self._has_parted = self._is_closed = False
        self._reading = threading.RLock()
        self._read_ahead: set[int] = set()
        self._poller = select.poll()
        self._peer_of: dict[int, int] = {}
        self._process_of: dict[int, int] = {}
        for peer, sock in self._sockets.items():
            self._peer_of[sock.fileno()] = peer
            self._poller.register(sock, select.POLLIN)
            process = open_process(sock)
            if process is not None:
                self._process_of[peer] = process
                self._peer_of[process] = peer
                self._poller.register(process, select.POLLIN)
        give_up_in_children(self)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, in order."""
        return tuple(sorted(self._partial))

    def socket_of(self, peer: int) -> socket.socket:
        """Return the socket to a connected peer."""
        return self._sockets[peer]

    def is_connected(self, peer: int) -> bool:
        """Tell whether a peer can still be spoken to, as far as is known."""
        return peer in self._sockets and peer not in self._left

    def on(self, peer: int, kind: int, handler: Handler) -> None:
        """Hand frames of a kind from a peer to ``handler``, those that came early first."""
        self._handlers[peer, kind] = handler
        for sequence, flags, body in self._early.pop((peer, kind), ()):
            handler(sequence, flags, memoryview(body))

    # -- sending --------------------------------------------------------------------------------

    def send(self, peer: int, kind: int, flags: int, sequence: int, *parts: Any) -> None:
        """Send a frame; never blocks, and the parts (byte buffers) may be reused at once."""
        sock = self._sockets.get(peer)
        if sock is None or not self.is_connected(peer):
            self._blame_for_leaving(peer, "sends to it")
        size = sum(len(part) for part in parts)
        frame = [_HEADER.pack(size, sequence, kind, flags), *parts]
        if len(frame) > _MAX_PARTS:
            frame = [b"".join(frame)]
        unsent = self._unsent[peer]
        sent = 0
        if not unsent:
            try:
                sent = sock.sendmsg(frame)
            except BlockingIOError:
                pass
            except OSError:  # the end of the stream tells who is gone, and why
                return
            except BaseException:  # of a signal's handler: how much was sent is not known
                if size > _WHOLE_BYTES:
                    self._torn.add(peer)
                raise
        if sent < _HEADER.size + size:
            unsent.append(memoryview(b"".join(frame))[sent:])
            self._poller.modify(sock, select.POLLIN | select.POLLOUT)

    def has_unsent(self, peer: int) -> bool:
        """Tell whether something for a peer waits for its socket to take more."""
        return bool(self._unsent[peer])

    def flush(self) -> None:
        """Wait until the sockets have taken everything."""
        if any(self._unsent.values()):
            self.wait(lambda: not any(self._unsent.values()), lambda: "its peers to read")

    def _send_on(self, peer: int) -> None:
        sock, unsent = self._sockets[peer], self._unsent[peer]
        try:
            while unsent:
                sent = sock.send(unsent[0])
                unsent[0] = unsent[0][sent:]
                if not unsent[0]:
                    unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            unsent.clear()
        except BaseException:
            self._torn.add(peer)
            raise
        self._poller.modify(sock, select.POLLIN)

    # -- waiting --------------------------------------------------------------------------------

    def wait(
        self,
        ready: Callable[[], object],
        what: Callable[[], str],
        *,
        every_s: float = math.inf,
    ) -> None:
        """Wait until ``ready()``; meanwhile read what comes.

        Args:
            ready: what is waited for.
            what: says it in words, for the errors: "activation 3 from stage 1 (rank 1)".
            every_s: how often to ask ``ready`` although no socket speaks, for what none tells of.

        Raises:
            RemoteStageError: a peer failed; PeerLostError if it ended without a word.
            WaitTimeoutError: after ``timeout_s``.
        """
        if ready():
            return
        started = time.monotonic()
        stall_s, timeout_s, tell_s = self._stall_timeout_s, self._timeout_s, _TELL_AFTER_S
        while True:
            waited = time.monotonic() - started
            self._read_and_write(
                min(tell_s - waited, stall_s - waited, timeout_s - waited, every_s)
            )
            if ready():  # before any failure: what a peer said earlier counts
                if tell_s == math.inf:
                    self._onlooker.end_wait()
                return
            self._raise_failure()
            waited = time.monotonic() - started
            if waited >= tell_s:
                self._onlooker.start_wait(what(), started)
                tell_s = math.inf
            if waited >= timeout_s:
                raise WaitTimeoutError(
                    f"rank {self.rank} has waited {waited:.1f} s for {what()}; if that is not a "
                    "fault, give Stage a larger timeout_s"
                )
            if waited >= stall_s:
                self._end_vanished()
                self._onlooker.stalled(what(), waited)
                stall_s *= 2

    def wait_for(
        self,
        peer: int,
        ready: Callable[[], object],
        what: Callable[[], str],
        *,
        every_s: float = math.inf,
        grace_s: float = 0.0,
    ) -> None:
        """Wait until ``ready()``, which only ``peer`` can bring about.

        Args:
            peer: it must not have left, or not longer than ``grace_s`` ago.
            ready: as for ``wait``.
            what: as for ``wait``.
            every_s: as for ``wait``.
            grace_s: how long, in seconds, what a peer did before it left may take to show here.
        """
        left_s = math.inf

        def is_over() -> bool:
            nonlocal left_s
            if ready():
                return True
            if peer in self._left:
                left_s = min(left_s, time.monotonic())
            return time.monotonic() - left_s >= grace_s

        self.wait(is_over, what, every_s=every_s)
        if not ready():
            self._blame_for_leaving(peer, f"waits for {what()}")

    def wait_failure(self) -> None:
        """Give the story behind an error a moment to come, and raise it; return if none comes."""
        deadline = time.monotonic() + _STORY_TIMEOUT_S
        while self._sockets and (left_s := deadline - time.monotonic()) > 0:
            self.poll(left_s)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read what has come and send on what waits; blocks for ``timeout_s`` at most.

        Raises:
            RemoteStageError: a peer failed; PeerLostError if it ended without a word.
        """
        self._read_and_write(timeout_s)
        self._raise_failure()

    def _read_and_write(self, timeout_s: float) -> None:
        with self._reading:
            self._read_and_write_alone(timeout_s)

    def _read_and_write_alone(self, timeout_s: float) -> None:
        self.num_looks += 1
        while self._read_ahead:
            timeout_s = 0.0
            self._dispatch_partial(self._read_ahead.pop())
        for descriptor, event in self._poller.poll(max(0.0, timeout_s) * 1000):
            peer = self._peer_of.get(descriptor)
            if peer is None:  # it ended with an event before this one
                continue
            if descriptor == self._process_of.get(peer):
                self._process_ended(peer)
                continue
            if event & select.POLLOUT:
                self._send_on(peer)
            if event & ~select.POLLOUT:
                self._read(peer)

    def overheard(self) -> tuple[RemoteStageError | None, set[int]] | None:
        """Look, in another thread, for what the main thread is going to read.

        Returns:
            The failure of a peer, if there is one, and the peers that have left; None while the
            main thread is reading itself, and once the mesh is closed.
        """
        if not self._reading.acquire(blocking=False):
            return None
        try:
            if self._has_told or self._is_closed:
                return None
            left = set(self._left)
            if isinstance(self._failure, RemoteStageError):  # read, but not raised yet
                return self._failure, left
            for peer, sock in self._sockets.items():
                failure = self._peeked(peer, sock, left)
                if failure is not None:
                    return failure, left
            return None if self._failure else (None, left)
        finally:
            self._reading.release()

    def _peeked(self, peer: int, sock: socket.socket, left: set[int]) -> RemoteStageError | None:
        """Look whether a peer has failed or (added to ``left``) left, as far as can be seen."""
        process, data = self._process_of.get(peer), self._partial[peer]
        has_ended = process is not None and bool(select.select([process], [], [], 0)[0])
        with contextlib.suppress(BlockingIOError):
            while len(data) < _MAX_AHEAD_BYTES:
                try:
                    read = sock.recv(_READ_BYTES)
                except ConnectionError:
                    read = b""
                if not read:
                    has_ended = True
                    break
                data += read
                self._read_ahead.add(peer)
        position = 0
        while position + _HEADER.size <= len(data):
            size, _, kind, _ = _HEADER.unpack_from(data, position)
            body = data[position + _HEADER.size : position + _HEADER.size + size]
            position += _HEADER.size + size
            if kind == GOODBYE:
                left.add(peer)
            elif kind == FAILURE and len(body) == size:
                return _failure_from(bytes(body))
        return self._lost(peer, sock) if has_ended and peer not in left else None

    def _end_vanished(self) -> None:
        """Take the ranks of a host that no longer answers for dead."""
        for peer, sock in list(self._sockets.items()):
            if has_vanished(sock):
                self._ended(peer)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            if isinstance(self._failure, RemoteStageError):
                is_lost = isinstance(self._failure, PeerLostError)
                self.tell_failure(self._failure.rank, self._failure.story, is_lost=is_lost)
            raise self._failure

    def _process_ended(self, peer: int) -> None:
        """Read what a peer said before its process ended."""
        while self._read(peer):
            pass
        if peer in self._sockets:
            self._ended(peer)

    def _read(self, peer: int) -> bool:
        """Read once; tell whether there may be more."""
        sock, partial = self._sockets[peer], self._partial[peer]
        try:
            num_read = sock.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except OSError:
            num_read = 0
        if num_read == 0:
            self._ended(peer)
            return False
        view = self._buffer[:num_read]
        if partial:
            partial += view
            self._dispatch_partial(peer)
        elif (taken := self._dispatch(peer, view)) < num_read:
            self._partial[peer] = bytearray(view[taken:])
        return True

    def _dispatch_partial(self, peer: int) -> None:
        partial = self._partial[peer]
        taken = self._dispatch(peer, memoryview(partial))
        if taken:
            self._partial[peer] = bytearray(memoryview(partial)[taken:])

    def _dispatch(self, peer: int, data: memoryview) -> int:
        """Hand whole frames on; return how many bytes they took."""
        position = 0
        while position + _HEADER.size <= len(data):
            size, sequence, kind, flags = _HEADER.unpack_from(data, position)
            end = position + _HEADER.size + size
            if end > len(data):
                break
            body = data[position + _HEADER.size : end]
            position = end
            handler = self._handlers.get((peer, kind))
            if handler is not None:
                handler(sequence, flags, body)
            elif kind == GOODBYE:
                self._left.add(peer)
            elif kind == FAILURE:
                self._heard_failure(bytes(body))
            else:
                self._early[peer, kind].append((sequence, flags, bytearray(body)))
        return position

    # -- endings --------------------------------------------------------------------------------

    def tell_failure(self, origin: int, story: str, *, is_lost: bool = False) -> None:
        """Tell every peer, once, that rank ``origin`` failed; waits a moment for the sockets.

        It goes before all that the sockets have not begun to take.
        """
        with put_off():
            if self._has_told:
                return
            self._has_told = True
            for unsent in self._unsent.values():
                while unsent and not _is_begun(unsent[-1]):
                    unsent.pop()
            body = json.dumps({"rank": origin, "story": story, "is_lost": is_lost}).encode()
            self._tell_all(FAILURE, body)

    def part(self, timeout_s: float) -> None:
        """Say goodbye, and give the others a moment to come to their end and say it, too."""
        if self._has_told or self._failure is not None:
            return
        self._tell_all(GOODBYE, b"")
        self._has_parted = True
        deadline_s = time.monotonic() + timeout_s
        while self._sockets.keys() - self._left and time.monotonic() < deadline_s:
            self._read_and_write(deadline_s - time.monotonic())

    def close(self) -> None:
        """Say goodbye and close the sockets."""
        if not (self._has_told or self._has_parted):
            self._tell_all(GOODBYE, b"")
        self.lookout.close()
        self._close_descriptors()
        self._handlers.clear()

    def give_up_in_child(self) -> None:
        """Close a forked child's copies of the sockets; what is called there later raises."""
        self._has_told = True
        self._reading = threading.RLock()  # of the parent's threads one may have had the other
        self._close_descriptors()
        for unsent in self._unsent.values():
            unsent.clear()
        self._failure = StageClosedError(
            f"this process ({os.getpid()}) was forked from that of rank {self.rank} "
            f"({os.getppid()}): only that one can use its stage"
        )

    def check_process(self) -> None:
        """Check that this is not a forked child, before what no socket is needed for.

        Raises:
            StageClosedError: it is.
        """
        if isinstance(self._failure, StageClosedError):
            raise self._failure

    def _close_descriptors(self) -> None:
        with self._reading:
            self._close_descriptors_alone()

    def _close_descriptors_alone(self) -> None:
        self._is_closed = True
        for sock in self._sockets.values():
            sock.close()
        for process in self._process_of.values():
            os.close(process)
        self._sockets.clear()
        self._process_of.clear()
        self._peer_of.clear()
        self._poller = select.poll()

    def _tell_all(self, kind: int, body: bytes) -> None:
        for peer in self._sockets.keys() - self._left - self._torn:
            self.send(peer, kind, 0, 0, body)
        deadline = time.monotonic() + _LAST_WORDS_TIMEOUT_S
        while busy := [peer for peer in self._sockets if self._unsent[peer]]:
            poller = select.poll()
            for peer in busy:
                poller.register(self._sockets[peer], select.POLLOUT)
                if peer in self._process_of:
                    poller.register(self._process_of[peer], select.POLLIN)
            for descriptor, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                told = self._peer_of[descriptor]
                if descriptor == self._process_of.get(told):
                    self._unsent[told].clear()  # nobody will read it
                elif self._unsent[told]:
                    self._send_on(told)
            if time.monotonic() > deadline:
                return

    def _heard_failure(self, body: bytes) -> None:
        if self._failure is None:
            self._failure = _failure_from(body)

    def _ended(self, peer: int) -> None:
        sock = self._sockets.pop(peer)
        self._poller.unregister(sock)
        del self._peer_of[sock.fileno()]
        sock.close()
        process = self._process_of.pop(peer, None)
        if process is not None:
            self._poller.unregister(process)
            del self._peer_of[process]
            os.close(process)
        self._unsent[peer].clear()
        # One that had heard this rank's goodbye has gone without its own.
        if not (peer in self._left or self._failure is not None or self._has_parted):
            self._failure = self._lost(peer, sock)

    def _lost(self, peer: int, sock: socket.socket) -> PeerLostError:
        """Return the error for a peer whose process or connection has ended."""
        elsewhere = "" if sock.family == socket.AF_UNIX else ", or its host or network failed"
        story = (
            f"rank {peer} ended without a word: it was killed (out of memory?) or crashed"
            f"{elsewhere}; its own output and the launcher's exit code tell more"
        )
        seen = self._onlooker.last_seen(peer)
        return PeerLostError(peer, f"{story}; {seen}" if seen else story)

    def _blame_for_leaving(self, peer: int, meanwhile: str) -> NoReturn:
        """Fail because a peer has left, and tell all, or they would blame this rank in turn."""
        if self._failure is None:
            self._failure = PeerLostError(
                peer,
                f"rank {peer} has left the pipeline (its script ended, or closed its stage) while "
                f"rank {self.rank} {meanwhile}: every rank must make the same calls",
            )
        self._raise_failure()
        raise AssertionError("there is a failure")


def _failure_from(body: bytes) -> RemoteStageError:
    told = json.loads(body)
    kind = PeerLostError if told["is_lost"] else RemoteStageError
    return kind(told["rank"], told["story"])


def _is_begun(unsent: memoryview) -> bool:
    """Tell whether a frame's first bytes have been sent."""
    frame = unsent.obj
    assert isinstance(frame, bytes)
    return unsent.nbytes < len(frame)
