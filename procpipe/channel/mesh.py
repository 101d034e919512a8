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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from procpipe.channel.frames import READ_BYTES, Frames
from procpipe.channel.monitor import Monitor, too_long
from procpipe.errors import PeerLostError, RemoteStageError, StageClosedError
from procpipe.forks import give_up_in_children

#: Handles a frame: sequence number, flags, body (as for ``frames.Taker``).
Handler = Callable[[int, int, memoryview], None]

_Frame = tuple[int, int, memoryview]

#: The system's calls take no longer time, such as an infinite one.
_MAX_POLL_S = 3600.0

#: How long a leaving rank waits for peers that are too busy to read its last frame.
_LAST_FRAME_TIMEOUT_S = 5.0

#: How long a peer whose transfer or socket ended may take to say why; and how long effects of what
#: it did before it left may take, such as a transfer that its device completes first.
_FAILURE_TIMEOUT_S = 2.0

#: How long a wait asks again and again before it sleeps: to be woken takes about as long as a small
#: layer.
_AWAKE_S = 0.0002

#: How often to look whether the monitor knows.
_LOOK_EVERY_S = 0.02


class Mesh:
    """The connections of one rank; ``add`` is called with each other rank's.

    Attributes:
        monitor: notices the failures of peers.
        rank, ranks, name_of: as of the monitor.
        timeout_s: how long a wait may take.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.rank, self.ranks, self.name_of = monitor.rank, monitor.ranks, monitor.name_of
        self.timeout_s = monitor.timeout_s
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._data: dict[int, Frames] = {}
        self._data_of: dict[int, Frames] = {}  # by descriptor
        self._handlers: dict[tuple[int, int], Handler] = {}
        self._early: defaultdict[tuple[int, int], list[_Frame]] = defaultdict(list)
        self._poller = select.poll()
        self._poller.register(self.monitor.wakes_main, select.POLLIN)
        give_up_in_children(self)

    def add(
        self, peer: int, data: socket.socket, alarm: socket.socket, process: int | None
    ) -> None:
        """Add a connected peer: two sockets, and a descriptor of its process, if it has one."""
        frames = Frames(data, partial(self._take, peer), self._buffer)
        self._data[peer] = self._data_of[data.fileno()] = frames
        self._watch(frames)
        self.monitor.add(peer, alarm, process)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, in order, those that have left, too."""
        return tuple(sorted(self._data))

    def is_connected(self, peer: int) -> bool:
        """Return whether frames can still be sent to a peer, as far as is known."""
        data = self._data.get(peer)
        return data is not None and not data.has_ended

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
        if data is None or data.has_ended:
            self._blame_for_leaving(peer, "sends to it")
        data.send(frame_type, flags, sequence, parts, keep=keep)
        if data.unsent:
            self._watch(data)

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
    ) -> None:
        """Wait until ``ready()``; meanwhile read what comes.

        Args:
            ready: the condition.
            what: describes it in errors: "activation 3 from stage 1 (rank 1)".
            peer: the only rank that can bring it about, if there is one.
            every_s: how often to call ``ready`` although nothing comes, for what no frame shows;
                it may be so a moment after the peer has left.

        Raises:
            RemoteStageError: a peer failed; PeerLostError if its process ended, or ``peer`` left.
            WaitTimeoutError: after ``timeout_s``.
        """
        if ready():
            return
        self.check_open()  # in a forked child nothing would end the wait
        started_s, waited_s = time.monotonic(), 0.0
        self.monitor.start_wait(what, started_s)
        while True:
            if peer is not None and not self.is_connected(peer):
                if every_s < math.inf:
                    self._read_until(ready, _FAILURE_TIMEOUT_S)
                if not ready():
                    self._blame_for_leaving(peer, f"waits for {what()}")
            if waited_s < _AWAKE_S:
                os.sched_yield()  # to another rank on the same core
                self._read_and_write(0.0)
            else:
                self._read_and_write(min(self.timeout_s - waited_s, every_s))
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
        gone = self.monitor.left.intersection
        self._read_until(lambda: gone(peers), _FAILURE_TIMEOUT_S)
        self._raise_failure()
        if gone(peers):
            self._blame_for_leaving(min(gone(peers)), meanwhile)

    def _read_and_write(self, timeout_s: float) -> None:
        """Read and send what is possible within a time; after a failure, all that has come."""
        for descriptor, event in self._poller.poll(min(max(0.0, timeout_s), _MAX_POLL_S) * 1000):
            if descriptor == self.monitor.wakes_main:
                for data in self._data.values():
                    while data.read():
                        pass
                continue
            data = self._data_of[descriptor]
            if event & ~select.POLLIN:
                data.send_on()
            if event & ~select.POLLOUT:
                data.read()
            if event & ~select.POLLIN or data.has_ended:
                self._watch(data)

    def _watch(self, data: Frames) -> None:
        """Poll a socket for what is still to come and to be sent."""
        events = 0 if data.has_ended else select.POLLIN
        if data.unsent:
            events |= select.POLLOUT
        if events:
            self._poller.register(data.sock, events)
        else:
            self._poller.unregister(data.sock)

    def _raise_failure(self) -> None:
        if self.monitor.failure is not None:
            raise self.monitor.failure.again()

    def _take(
        self, peer: int, sequence: int, frame_type: int, flags: int, body: memoryview
    ) -> None:
        handler = self._handlers.get((peer, frame_type))
        if handler is not None:
            handler(sequence, flags, body)
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
        if self.monitor.failure is not None or self.monitor.has_left:
            return
        self._read_until(lambda: not any(map(self.has_unsent, self._data)), _LAST_FRAME_TIMEOUT_S)
        self.monitor.leave()
        for data in self._data.values():
            data.end()
        self._read_until(lambda: not any(map(self.is_connected, self._data)), timeout_s)

    def close(self) -> None:
        """Close the sockets, once; later calls raise an error."""
        if self.monitor.is_closed:  # the numbers of its descriptors may be those of others by now
            return
        self.monitor.close()
        for data in self._data.values():
            data.close()
        for held in (self._data, self._data_of, self._handlers):
            held.clear()
        self._poller = select.poll()

    def check_open(self) -> None:
        """Raise ``StageClosedError`` once it is closed; for operations that use no socket."""
        if self.monitor.is_closed:
            self._raise_failure()
            raise StageClosedError("the stage was closed")

    def give_up_in_child(self) -> None:
        """Close a forked child's copies of the sockets; later calls there raise an error."""
        self.close()

    def _read_until(self, ready: Callable[[], object], timeout_s: float) -> None:
        """Read and send until a condition holds, there is a failure, or for some time."""
        deadline_s = time.monotonic() + timeout_s
        while not ready() and self.monitor.failure is None and time.monotonic() < deadline_s:
            self._read_and_write(min(deadline_s - time.monotonic(), _LOOK_EVERY_S))

    def _blame_for_leaving(self, peer: int, meanwhile: str) -> NoReturn:
        """Fail because a peer has left; send that to all, so that none names this rank instead."""
        self.check_open()
        # The monitor may have to read first whether it has left or failed.
        self._read_until(lambda: peer in self.monitor.left, _FAILURE_TIMEOUT_S)
        self._raise_failure()
        error = PeerLostError(
            self.ranks[peer],
            f"{self.name_of(peer)} has left the pipeline (its script ended, or closed its "
            f"stage) while {self.name_of(self.rank)} {meanwhile}: every rank must make the "
            "same calls",
        )
        self.fail(error)
        raise error
