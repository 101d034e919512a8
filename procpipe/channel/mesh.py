"""Framed messages between the ranks of one job, and the place where a process waits for them.

One connection (``connection.py``) joins each pair of ranks and carries everything between them:
orders of the coordinator, tokens and small tensors of channels, failures, goodbyes.

A process is single-threaded here: it reads frames while it waits (``wait``) and between tasks
(``poll``), and passes each to the handler registered for its peer and frame type. Since every wait
is a wait for sockets, it ends when a peer fails or dies: its failure, its goodbye or the end of
its stream wakes the waiter (``failures.py``). What a peer had sent before its end is handled first.
Only transfers that block in native code need another thread, which reports stalls
(``native_waits.py``).

While the main thread is in native code, for instance waiting for a device, another thread may look
for failures in what the main thread is going to read (``look_ahead``).
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from procpipe.channel.connection import Connections
from procpipe.channel.failures import Failures, decode_failure, encode_failure
from procpipe.channel.native_waits import NativeWaits, WaitReports
from procpipe.channel.sockets import has_vanished
from procpipe.errors import RemoteStageError, StageClosedError, WaitTimeoutError
from procpipe.forks import give_up_in_children
from procpipe.signals import put_off

#: Handles a frame: sequence number, flags, body (writable, valid only during the call).
Handler = Callable[[int, int, memoryview], None]
#: Returns memory for the body of a frame with these flags and of this size, or None.
Placer = Callable[[int, int], memoryview | None]
_Frame = tuple[int, int, bytearray]

BUSY = 253
GOODBYE = 254
FAILURE = 255

#: A longer wait is reported.
_REPORT_AFTER_S = 0.05

#: How long a leaving rank waits for peers that are too busy to read its last frame.
_LAST_FRAME_TIMEOUT_S = 5.0

#: How long a peer whose transfer broke may take to send its failure, or to end.
_FAILURE_TIMEOUT_S = 2.0


class _BusyPeers:
    """Peers that do what ``timeout_s`` does not count."""

    def __init__(self) -> None:
        self.peers: set[int] = set()
        self._changed_s = 0.0

    def note(self, peer: int, *, is_busy: bool) -> None:
        (self.peers.add if is_busy else self.peers.discard)(peer)
        self._changed_s = time.monotonic()

    def counted_s(self, started: float) -> float:
        """Return how much of a wait counts towards ``timeout_s``."""
        return 0.0 if self.peers else time.monotonic() - max(started, self._changed_s)


class Mesh:
    """The connections of one rank, made of a non-blocking socket to each other rank.

    ``ranks`` holds each rank's number in the job, which messages name; ``name_of`` describes one.
    A wait is reported as a stall after ``stall_timeout_s``, and an error after ``timeout_s``, which
    begins anew whenever a peer has been busy (``send_busy``).
    ``num_looks`` counts how often incoming data was looked for; ``failures`` are known so far.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        *,
        timeout_s: float,
        stall_timeout_s: float,
        reports: WaitReports,
        ranks: Sequence[int] = range(1 << 62),
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.name_of = name_of or (lambda rank: f"rank {ranks[rank]}")
        self.num_looks = 0
        self.peers = tuple(sorted(sockets))  # the other ranks, in order
        self.timeout_s = timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.reports = reports
        self.native_waits = NativeWaits(stall_timeout_s, reports)
        self._handlers: dict[tuple[int, int], Handler] = {}
        self._placers: dict[tuple[int, int], Placer] = {}
        self._early: defaultdict[tuple[int, int], list[_Frame]] = defaultdict(list)
        self.failures = Failures(rank, ranks, self.name_of, reports)
        self._busy = _BusyPeers()
        self._reading = threading.RLock()
        self._connections = Connections(sockets, self._take, self._place, self.failures.note_lost)
        give_up_in_children(self)

    def socket_of(self, peer: int) -> socket.socket:
        """Return the socket to a connected peer."""
        return self._connections.of[peer].sock

    def is_connected(self, peer: int) -> bool:
        """Return whether frames can still be sent to a peer, as far as is known."""
        return peer in self._connections.of and peer not in self.failures.left

    def on(self, peer: int, frame_type: int, handler: Handler, place: Placer | None = None) -> None:
        """Pass frames of a type from a peer to ``handler``, those that came early first.

        The body of a frame that does not come as a whole is read straight into the memory that
        ``place`` returns.
        """
        self._handlers[peer, frame_type] = handler
        if place is not None:
            self._placers[peer, frame_type] = place
        for sequence, flags, body in self._early.pop((peer, frame_type), ()):
            handler(sequence, flags, memoryview(body))

    # -- sending --------------------------------------------------------------------------------

    def send(
        self,
        peer: int,
        frame_type: int,
        flags: int,
        sequence: int,
        *parts: Any,
        keep: bool = False,
    ) -> None:
        """Send a frame; never blocks.

        The parts (byte buffers) may be reused at once: what the socket does not take is copied.
        With ``keep`` it is referred to, until the socket has taken it at later polls and waits.
        """
        if not self.is_connected(peer):
            self._blame_for_leaving(peer, "sends to it")
        self._connections.send(peer, frame_type, flags, sequence, parts, keep=keep)

    def send_busy(self, *, is_busy: bool) -> None:
        """Send to every peer that this rank begins or ends what ``timeout_s`` does not count."""
        for peer in self.peers:
            if self.is_connected(peer):
                self.send(peer, BUSY, int(is_busy), 0)

    def has_unsent(self, peer: int) -> bool:
        """Return whether data for a peer waits until its socket can take more."""
        connection = self._connections.of.get(peer)
        return connection is not None and connection.has_unsent

    def flush(self) -> None:
        """Wait until the sockets have taken everything."""
        self.wait(lambda: not self._connections.busy, lambda: "its peers to read")

    # -- waiting --------------------------------------------------------------------------------

    def wait(
        self,
        ready: Callable[[], object],
        what: Callable[[], str],
        *,
        peer: int | None = None,
        every_s: float = math.inf,
        grace_s: float = 0.0,
    ) -> None:
        """Wait until ``ready()``; meanwhile read what comes.

        Args:
            ready: the condition.
            what: describes it in errors: "activation 3 from stage 1 (rank 1)".
            peer: the only rank that can bring it about, if there is one.
            every_s: how often to call ``ready`` although nothing comes, for what no frame shows.
            grace_s: how long after the peer has left the effects of what it did before may take.

        Raises:
            RemoteStageError: a peer failed; PeerLostError if its process ended, or ``peer`` left.
            WaitTimeoutError: after ``timeout_s``.
        """
        if ready():
            return
        started, gone_s = time.monotonic(), math.inf
        stall_s, timeout_s, report_s = self.stall_timeout_s, self.timeout_s, _REPORT_AFTER_S
        while True:
            if peer in self.failures.left:
                gone_s = min(gone_s, time.monotonic())
                if time.monotonic() - gone_s >= grace_s:
                    self._blame_for_leaving(peer, f"waits for {what()}")
            waited = time.monotonic() - started
            left_s = timeout_s - self._busy.counted_s(started)
            self._read_and_write(min(report_s - waited, stall_s - waited, left_s, every_s))
            if ready():  # before any failure: a peer may have sent it before it failed
                if report_s == math.inf:
                    self.reports.end_wait()
                return
            self._raise_failure()
            waited = time.monotonic() - started
            if waited >= report_s:
                self.reports.start_wait(what(), started)
                report_s = math.inf
            if self._busy.counted_s(started) >= timeout_s:
                raise self.too_long(waited, what())
            if waited >= stall_s:
                self._end_vanished()
                self.reports.stalled(what(), waited)
                stall_s *= 2

    def too_long(self, waited_s: float, what: str) -> WaitTimeoutError:
        """Return the error for a wait that exceeds ``timeout_s``."""
        return WaitTimeoutError(
            f"{self.name_of(self.rank)} has waited {waited_s:.1f} s for {what}; if that is not a "
            "fault, give Stage a larger timeout_s"
        )

    def wait_failure(self, peers: Iterable[int] = (), meanwhile: str = "") -> None:
        """Wait a moment for the failure behind an error, and raise it; return if none comes.

        Of some peers it is a failure to have left; ``meanwhile`` says what this rank does.
        """
        deadline = time.monotonic() + _FAILURE_TIMEOUT_S
        self._raise_failure()
        while not (gone := self.failures.left.intersection(peers)):
            left_s = deadline - time.monotonic()
            if not self._connections.of or left_s <= 0:
                return
            self.poll(left_s)
        self._blame_for_leaving(min(gone), meanwhile)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read and send what is possible within ``timeout_s``; raises errors like ``wait``."""
        self._read_and_write(timeout_s)
        self._raise_failure()

    def _read_and_write(self, timeout_s: float) -> None:
        with self._reading:
            self.num_looks += 1
            self._connections.read_and_write(timeout_s)

    def look_ahead(self) -> tuple[RemoteStageError | None, set[int]] | None:
        """Look, in another thread, for failures in what the main thread is going to read.

        Returns the failure of a peer, if there is one, and the peers that have left; None while the
        main thread is reading itself, and once the mesh is closed.
        """
        if not self._reading.acquire(blocking=False):
            return None
        try:
            failures = self.failures
            if failures.is_sent or self._connections.is_closed:
                return None
            left = set(failures.left)
            if isinstance(failures.first, RemoteStageError):  # read, but not raised yet
                return failures.first, left
            for peer, frames, has_ended in self._connections.look_ahead():
                for frame_type, body in frames:
                    if frame_type == GOODBYE:
                        left.add(peer)
                    elif frame_type == FAILURE:
                        return decode_failure(body), left
                if has_ended and peer not in left:
                    is_local = self._connections.of[peer].is_local
                    return failures.lost(peer, is_local), left
            return None, left
        finally:
            self._reading.release()

    def _end_vanished(self) -> None:
        """Treat the ranks of hosts that no longer answer as dead."""
        for peer, connection in list(self._connections.of.items()):
            if has_vanished(connection.sock):
                self._connections.end(peer)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if failure := self.failures.first:
            if isinstance(failure, RemoteStageError):
                self.send_failure(failure)
            raise failure

    def _take(
        self, peer: int, sequence: int, frame_type: int, flags: int, body: memoryview
    ) -> None:
        handler = self._handlers.get((peer, frame_type))
        if handler is not None:
            handler(sequence, flags, body)
        elif frame_type == GOODBYE:
            self.failures.left.add(peer)
        elif frame_type == BUSY:
            self._busy.note(peer, is_busy=bool(flags))
        elif frame_type != FAILURE:
            self._early[peer, frame_type].append((sequence, flags, bytearray(body)))
        elif self.failures.first is None:
            self.failures.first = decode_failure(bytes(body))

    def _place(self, peer: int, frame_type: int, flags: int, num_bytes: int) -> memoryview | None:
        place = self._placers.get((peer, frame_type))
        return None if place is None else place(flags, num_bytes)

    # -- endings --------------------------------------------------------------------------------

    def send_failure(self, error: RemoteStageError) -> None:
        """Send to every peer, once, that a rank failed; waits a moment for the sockets.

        It overtakes everything that the sockets have not begun to take.
        """
        with put_off():
            if self.failures.is_sent:
                return
            self.failures.is_sent = True
            for connection in self._connections.of.values():
                connection.drop_unsent(but_begun=True)
            self._send_to_all(FAILURE, encode_failure(error).encode())

    def part(self, timeout_s: float) -> None:
        """Send a goodbye, and wait up to ``timeout_s`` for those of the others."""
        if self.failures.is_sent or self.failures.first is not None:
            return
        self._send_to_all(GOODBYE, b"")
        self.failures.has_parted = True
        deadline_s = time.monotonic() + timeout_s
        while self._connections.of.keys() - self.failures.left and time.monotonic() < deadline_s:
            self._read_and_write(deadline_s - time.monotonic())

    def close(self) -> None:
        """Send a goodbye and close the sockets."""
        if not (self.failures.is_sent or self.failures.has_parted):
            self._send_to_all(GOODBYE, b"")
        self.native_waits.close()
        with self._reading:
            self._connections.close()
        self._handlers.clear()
        self._placers.clear()

    def give_up_in_child(self) -> None:
        """Close a forked child's copies of the sockets; later calls there raise an error."""
        self._reading = threading.RLock()  # a thread of the parent may hold the old one
        self._connections.close()
        self.failures.note_forked()

    def check_process(self) -> None:
        """Raise ``StageClosedError`` in a forked child; for operations that use no socket."""
        if isinstance(self.failures.first, StageClosedError):
            raise self.failures.first

    def _send_to_all(self, frame_type: int, body: bytes) -> None:
        """Send a last frame to all peers; waits a limited time until the sockets have taken it."""
        for peer, connection in tuple(self._connections.of.items()):
            if peer not in self.failures.left and not connection.is_torn:
                self._connections.send(peer, frame_type, 0, 0, (body,))
        self._connections.send_rest(_LAST_FRAME_TIMEOUT_S)

    def _blame_for_leaving(self, peer: int, meanwhile: str) -> NoReturn:
        """Fail because a peer has left; send that to all, so that none names this rank instead."""
        self._raise_failure()
        self.failures.first = self.failures.gone(peer, meanwhile)
        self._raise_failure()
        raise AssertionError("there is a failure")
