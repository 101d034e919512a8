"""The data sockets between the ranks of one job, and the one place that waits for other ranks.

    main thread       waits for ranks in ``Mesh.wait`` only, or for its device
    monitor thread    polls alarms and ends of peers; never data sockets, never CUDA
    other threads     wait for no rank
    exceptions        while ranks connect (``job/start.py``), and while NCCL and gloo do

The main thread reads frames while it waits (``wait``) and between tasks (``poll``), and passes each
to the handler registered for its peer and frame type. What a peer had sent before it failed is
handled first; then the wait raises the failure (``docs/starting_and_ending.md``).
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from procpipe.channel.frames import READ_BYTES, Frames
from procpipe.channel.monitor import GOODBYE, Monitor, Reports, too_long
from procpipe.errors import PeerLostError, RemoteStageError, StageClosedError
from procpipe.forks import give_up_in_children

#: Handles a frame: sequence number, flags, body (as for ``frames.Taker``).
Handler = Callable[[int, int, memoryview], None]

_Frame = tuple[int, int, memoryview]

#: The system's calls take no longer time, such as an infinite one.
_MAX_POLL_S = 3600.0

#: How long a leaving rank waits for peers that are too busy to read its last frame.
_LAST_FRAME_TIMEOUT_S = 5.0

#: How long a peer whose transfer or socket broke may take to send its failure, or to end.
_FAILURE_TIMEOUT_S = 2.0


class Mesh:
    """The connections of one rank; ``add`` is called with each other rank's.

    A wait is reported as a stall after ``stall_timeout_s``, and an error after ``timeout_s``.

    Attributes:
        rank: this one.
        ranks: each rank's number in the job, which messages name.
        name_of: describes a rank.
        monitor: notices the failures of peers.
    """

    def __init__(
        self,
        rank: int,
        *,
        timeout_s: float,
        stall_timeout_s: float,
        reports: Reports,
        ranks: Sequence[int] = range(1 << 62),
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.name_of = name_of or (lambda rank: f"rank {ranks[rank]}")
        self.timeout_s = timeout_s
        self.monitor = Monitor(
            rank,
            ranks,
            self.name_of,
            reports,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._data: dict[int, Frames] = {}
        self._peer_of: dict[int, int] = {}  # by descriptor
        self._left: set[int] = set()
        self._handlers: dict[tuple[int, int], Handler] = {}
        self._early: defaultdict[tuple[int, int], list[_Frame]] = defaultdict(list)
        self._poller = select.poll()
        self._poller.register(self.monitor.wakes_main, select.POLLIN)
        self._has_left = self._is_closed = False
        give_up_in_children(self)

    def add(
        self, peer: int, data: socket.socket, alarm: socket.socket, process: int | None
    ) -> None:
        """Add a connected peer: two sockets, and a descriptor of its process, if it has one."""
        self._data[peer] = Frames(data, partial(self._take, peer), self._buffer)
        self._peer_of[data.fileno()] = peer
        self._poller.register(data, select.POLLIN)
        self.monitor.add(peer, alarm, process)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, in order, those that have left, too."""
        return tuple(sorted({*self._data, *self._left}))

    def is_connected(self, peer: int) -> bool:
        """Return whether frames can still be sent to a peer, as far as is known."""
        return peer in self._data and peer not in self._left

    def on(self, peer: int, frame_type: int, handler: Handler) -> None:
        """Pass frames of a type from a peer to ``handler``, those that came early first."""
        self._handlers[peer, frame_type] = handler
        for frame in self._early.pop((peer, frame_type), ()):
            handler(*frame)

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
        """Send a frame; never blocks, and the parts (byte buffers) may be reused at once.

        With ``keep`` they may not, until they are sent and no longer referenced.
        """
        data = self._data.get(peer)
        if data is None or peer in self._left:
            self._blame_for_leaving(peer, "sends to it")
        data.send(frame_type, flags, sequence, parts, keep=keep)
        if data.unsent:
            self._poller.modify(data.sock, select.POLLIN | select.POLLOUT)

    def has_unsent(self, peer: int) -> bool:
        """Return whether data for a peer waits until its socket can take more."""
        data = self._data.get(peer)
        return data is not None and bool(data.unsent)

    def flush(self) -> None:
        """Wait until the sockets have taken everything."""
        self.wait(lambda: not any(map(self.has_unsent, self._data)), lambda: "its peers to read")

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
        self.check_open()  # in a forked child nothing would end the wait
        started_s, gone_s = time.monotonic(), math.inf
        self.monitor.start_wait(what, started_s)
        while True:
            now_s = time.monotonic()
            if peer in self._left:
                gone_s = min(gone_s, now_s)
                if now_s - gone_s >= grace_s:
                    self._blame_for_leaving(peer, f"waits for {what()}")
            self._read_and_write(min(started_s + self.timeout_s - now_s, every_s))
            if ready():  # before any failure: a peer may have sent it before it failed
                self.monitor.end_wait()
                return
            self._raise_failure()
            waited_s = time.monotonic() - started_s
            if waited_s >= self.timeout_s:
                raise too_long(self.name_of(self.rank), waited_s, what())

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read and send what is possible within ``timeout_s``; raises errors like ``wait``."""
        self._read_and_write(timeout_s)
        self._raise_failure()

    def wait_failure(self, peers: Iterable[int] = (), meanwhile: str = "") -> None:
        """Wait a moment for the failure behind an error, and raise it; return if none comes.

        Of some peers it is a failure to have left; ``meanwhile`` says what this rank does.
        """
        gone = self._left.intersection
        self._read_until(lambda: gone(peers) or not self._data, _FAILURE_TIMEOUT_S)
        self._raise_failure()
        if gone(peers):
            self._blame_for_leaving(min(gone(peers)), meanwhile)

    def _read_and_write(self, timeout_s: float) -> None:
        """Read and send what is possible within a time; after a failure, all that has come."""
        for descriptor, event in self._poller.poll(min(max(0.0, timeout_s), _MAX_POLL_S) * 1000):
            if descriptor == self.monitor.wakes_main:
                for peer in tuple(self._data):
                    while self._read(peer):
                        pass
            elif descriptor in self._peer_of:  # else closed by an event before this one
                peer = self._peer_of[descriptor]
                if event & select.POLLOUT:
                    self._send_on(peer)
                if event & ~select.POLLOUT:
                    self._read(peer)

    def _read(self, peer: int) -> bool:
        data = self._data.get(peer)
        if data is None:
            return False
        may_have_more = data.read()
        if data.has_ended:
            self._end(peer)
        return may_have_more

    def _send_on(self, peer: int) -> None:
        data = self._data[peer]
        data.send_on()
        if not data.unsent:
            self._poller.modify(data.sock, select.POLLIN)

    def _end(self, peer: int) -> None:
        """Close the socket of a peer that has ended; if it has not left, its failure follows."""
        data = self._data.pop(peer)
        self._poller.unregister(data.sock)
        del self._peer_of[data.sock.fileno()]
        data.close()
        if peer not in self._left and not self._has_left:
            self._left.add(peer)
            poller = select.poll()
            poller.register(self.monitor.wakes_main, select.POLLIN)
            poller.poll(_FAILURE_TIMEOUT_S * 1000)

    def _raise_failure(self) -> None:
        if self.monitor.failure is not None:
            raise self.monitor.failure

    def _take(
        self, peer: int, sequence: int, frame_type: int, flags: int, body: memoryview
    ) -> None:
        handler = self._handlers.get((peer, frame_type))
        if handler is not None:
            handler(sequence, flags, body)
        elif frame_type == GOODBYE:
            self._left.add(peer)
        else:
            if len(body) <= READ_BYTES:
                body = memoryview(bytearray(body))
            self._early[peer, frame_type].append((sequence, flags, body))

    # -- endings --------------------------------------------------------------------------------

    def fail(self, error: RemoteStageError) -> None:
        """Send to every peer, once, that a rank failed; overtakes all data. Never raises."""
        self.monitor.fail(error)

    def leave(self, timeout_s: float = 0.0) -> None:
        """Send a goodbye, unless there was a failure; wait up to ``timeout_s`` for all others'.

        Before that it waits a few seconds at most until the sockets have taken everything.
        """
        if self.monitor.failure is not None or self._has_left:
            return
        for peer in self._data.keys() - self._left:
            self.send(peer, GOODBYE, 0, 0)
        self._read_until(lambda: not any(map(self.has_unsent, self._data)), _LAST_FRAME_TIMEOUT_S)
        self.monitor.leave()
        self._has_left = True
        self._read_until(lambda: not self._data.keys() - self._left, timeout_s)

    def close(self) -> None:
        """Close the sockets, once; later calls raise an error."""
        if self._is_closed:  # the numbers of its descriptors may be those of others by now
            return
        self._is_closed = True
        self.monitor.close()
        for data in self._data.values():
            data.close()
        for held in (self._data, self._peer_of, self._handlers):
            held.clear()
        self._poller = select.poll()

    def check_open(self) -> None:
        """Raise ``StageClosedError`` once it is closed; for operations that use no socket."""
        if self._is_closed:
            self._raise_failure()
            raise StageClosedError("the stage was closed")

    def give_up_in_child(self) -> None:
        """Close a forked child's copies of the sockets; later calls there raise an error."""
        if self._is_closed:
            return
        self.monitor.give_up_in_child(
            StageClosedError(
                f"this process ({os.getpid()}) was forked from that of rank "
                f"{self.ranks[self.rank]} ({os.getppid()}): only that one can use its stage"
            )
        )
        self.close()

    def _read_until(self, ready: Callable[[], object], timeout_s: float) -> None:
        """Read and send until a condition holds, there is a failure, or for some time."""
        deadline_s = time.monotonic() + timeout_s
        while not ready() and self.monitor.failure is None and time.monotonic() < deadline_s:
            self._read_and_write(deadline_s - time.monotonic())

    def _blame_for_leaving(self, peer: int, meanwhile: str) -> NoReturn:
        """Fail because a peer has left; send that to all, so that none names this rank instead."""
        self._raise_failure()
        error = PeerLostError(
            self.ranks[peer],
            f"{self.name_of(peer)} has left the pipeline (its script ended, or closed its "
            f"stage) while {self.name_of(self.rank)} {meanwhile}: every rank must make the "
            "same calls",
        )
        self.fail(error)
        raise error
