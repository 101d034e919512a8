"""The thread that notices the ends of peers while the main thread is anywhere.

Each pair of ranks has two sockets: one for data, which only the main thread uses (``mesh.py``), and
one for alarms, which only this thread uses, for both directions. So a failure overtakes all data,
and no signal handler, which runs in the main thread, interrupts it halfway. What it makes of each
event is in the tables of ``docs/starting_and_ending.md``. A peer has ended when its alarm socket or
its process ends (pidfd), as a child of its own may keep the socket open.

It reads counters of the host and calls nothing of CUDA: a query may block while the main thread
waits for the device (https://github.com/pytorch/pytorch/issues/104487).
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from procpipe.channel.frames import READ_BYTES, Frames
from procpipe.errors import PeerLostError, ProcpipeError, RemoteStageError, WaitTimeoutError

#: Frame types. A failure has the rank where it began as its number, and its story as its body.
LOST, GOODBYE, FAILURE = 253, 254, 255

#: How often the thread looks at the main one, at least.
_LOOK_EVERY_S = 0.2

#: A longer wait is written on the board.
_NOTE_AFTER_S = 0.05

#: How long the main thread may stay where it is, after a failure, before that counts as stuck.
_STUCK_AFTER_S = 1.0

#: How long the main thread waits until this one has sent what it was given.
_SEND_TIMEOUT_S = 5.0


class Reports:
    """Receives reports on one rank, and ends it; this base class ignores them."""

    def note_wait(self, what: str, since_s: float) -> None:
        """Handle a long wait, which began at ``since_s`` (``time.monotonic()``); "" ends it."""

    def stalled(self, what: str, waited_s: float) -> None:
        """Handle a wait as long as the stall timeout; called again after twice the time."""

    def last_seen(self, peer: int) -> str:
        """Return a sentence on what a peer was doing when it died, or ""."""
        return ""

    def busy_with(self) -> list[int]:
        """Return the peers with which transfers are queued on this rank's device."""
        return []

    def end_process(self, error: ProcpipeError) -> None:
        """End this process, whose main thread is stuck in a wait for its device."""


@dataclass(eq=False)
class Wait:
    """A wait of the main thread, for another rank or for its device."""

    what: Callable[[], str]
    since_s: float
    note_after_s: float
    next_stall_s: float
    place: object = None  # where the main thread waits for its device


class Monitor:
    """The thread of one rank's pipeline; it starts before the first peer is connected.

    A wait of the main thread is reported as a stall after ``stall_timeout_s``, and twice as long.

    Attributes:
        rank: this one.
        ranks: each rank's number in the job, which messages name.
        name_of: describes a rank.
        timeout_s: how long a wait may take.
        failure: the first failure, of a peer or of this rank.
        left: the peers that have left in good order.
        has_left: whether this rank has; nothing of its peers matters then.
        is_closed: whether the thread is to end.
        wakes_main: a descriptor that is readable once there is a failure.
    """

    def __init__(
        self,
        rank: int,
        reports: Reports,
        *,
        timeout_s: float,
        stall_timeout_s: float,
        ranks: Sequence[int] = range(1 << 62),
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.name_of = name_of or (lambda rank: f"rank {ranks[rank]}")
        self.timeout_s = timeout_s
        self.failure: RemoteStageError | None = None
        self.left: set[int] = set()
        self.has_left = self.is_closed = False
        self.wakes_main = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakes_us = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reports = reports
        self._stall_timeout_s = stall_timeout_s
        self._main = threading.get_ident()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._alarms: dict[int, Frames] = {}
        self._processes: list[int] = []
        self._peer_of: dict[int, int] = {}  # by descriptor, of an alarm or a process
        self._poller = select.poll()
        self._poller.register(self._wakes_us, select.POLLIN)
        self._wait: Wait | None = None  # of the main thread for another rank
        self._in_device: Wait | None = None
        self._shown: tuple[str, float] = "", 0.0  # on the board
        self._num_waits = 0
        self._asked: list[tuple[Callable[[], None], threading.Event]] = []
        self._failed_s = math.inf
        self._thread = threading.Thread(target=self._run, name="procpipe monitor", daemon=True)

    def add(self, peer: int, alarm: socket.socket, process: int | None) -> None:
        """Watch a peer: its alarm socket, and a descriptor of its process, if it has one."""
        self._alarms[peer] = Frames(alarm, partial(self._take, peer), self._buffer)
        watched = [alarm.fileno()]
        if process is not None:
            self._processes.append(process)
            watched.append(process)
        for descriptor in watched:
            self._peer_of[descriptor] = peer
            self._poller.register(descriptor, select.POLLIN)
        self.start()
        self._wake()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread.ident is None:
            self._thread.start()

    # -- for the main thread --------------------------------------------------------------------

    def start_wait(self, what: Callable[[], str], since_s: float) -> None:
        """Follow a wait of the main thread from now on."""
        self._num_waits += 1
        self._wait = Wait(what, since_s, _NOTE_AFTER_S, self._stall_timeout_s)

    def end_wait(self) -> None:
        """Follow it no more: it was successful."""
        self._wait = None
        if self._shown[0]:
            self._wake()

    def fail(self, error: RemoteStageError) -> None:
        """Send this rank's failure to every peer, unless there was one; waits until it is sent."""
        self._do(partial(self._note, error))

    def leave(self) -> None:
        """Send a goodbye to every peer, unless there was a failure; waits until it is sent."""
        self._do(self._say_goodbye)

    def close(self) -> None:
        """End the thread, and close the alarm sockets."""
        self.is_closed = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(_SEND_TIMEOUT_S)
        for alarm in self._alarms.values():
            alarm.close()
        for descriptor in (self.wakes_main, self._wakes_us, *self._processes):
            os.close(descriptor)

    def _do(self, act: Callable[[], None]) -> None:
        """Have the thread do something, and wait for that; a signal ends only the wait."""
        if not self._thread.is_alive():
            act()
            return
        is_done = threading.Event()
        self._asked.append((act, is_done))
        self._wake()
        is_done.wait(_SEND_TIMEOUT_S)

    def _wake(self) -> None:
        os.eventfd_write(self._wakes_us, 1)

    # -- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a fault here, after which nothing would be noticed
            story = f"its monitor thread: {''.join(traceback.format_exception(error))}"
            self._note(RemoteStageError(self.ranks[self.rank], story))

    def _watch(self) -> None:
        every_s = min(_LOOK_EVERY_S, self._stall_timeout_s / 4, self.timeout_s / 4)
        while not self.is_closed:
            for descriptor, _ in self._poller.poll(every_s * 1000):
                self._look_at(descriptor)
            while self._asked:
                act, is_done = self._asked.pop(0)
                act()
                is_done.set()
            self._look_at_main(time.monotonic())

    def _look_at(self, descriptor: int) -> None:
        if descriptor == self._wakes_us:
            os.eventfd_read(descriptor)
        elif descriptor in self._peer_of:  # else it has ended by an event before this one
            peer = self._peer_of[descriptor]
            alarm = self._alarms[peer]
            while alarm.read():
                pass
            if alarm.has_ended or descriptor != alarm.sock.fileno():
                self._end(peer)

    def _take(self, peer: int, rank: int, frame_type: int, _: int, story: memoryview) -> None:
        if frame_type == GOODBYE:
            self.left.add(peer)
        else:
            error_type = PeerLostError if frame_type == LOST else RemoteStageError
            self._note(error_type(rank, str(story, "utf-8", "surrogatepass")))

    def _end(self, peer: int) -> None:
        """Watch a peer that has ended no more, which is a failure if it has not left before."""
        for descriptor in [each for each, of in self._peer_of.items() if of == peer]:
            self._poller.unregister(descriptor)
            del self._peer_of[descriptor]
        if peer in self.left:
            return
        is_local = self._alarms[peer].sock.family == socket.AF_UNIX
        elsewhere = "" if is_local else ", or its host or network failed"
        story = (
            f"{self.name_of(peer)} ended without a message: it was killed (out of memory?) or "
            f"crashed{elsewhere}; see its own output and the launcher's exit code"
        )
        seen = self._reports.last_seen(peer)
        self._note(PeerLostError(self.ranks[peer], f"{story}; {seen}" if seen else story))

    def _note(self, error: RemoteStageError) -> None:
        """Keep the first failure, pass it on, and wake the main thread."""
        # No fault after this rank's goodbye: a peer may have ended without sending its own.
        if self.failure is not None or self.has_left:
            return
        self.failure, self._failed_s = error.again(), time.monotonic()
        frame_type = LOST if isinstance(error, PeerLostError) else FAILURE
        self._send_to_all(frame_type, error.rank, error.story.encode(errors="surrogatepass"))
        os.eventfd_write(self.wakes_main, 1)

    def _say_goodbye(self) -> None:
        if self.failure is None:
            self._send_to_all(GOODBYE, 0, b"")
            self.has_left = True

    def _send_to_all(self, frame_type: int, number: int, body: bytes) -> None:
        """Send a frame of 400 kB at most (``story_of``), which an empty socket takes at once."""
        for peer, alarm in tuple(self._alarms.items()):
            if peer not in self.left:
                alarm.send(frame_type, 0, number, (body,))

    def _look_at_main(self, now_s: float) -> None:
        """Report a long wait of the main thread; end the process if it will never end."""
        wait = self._wait or self._wait_for_device(now_s)
        what, since_s = ("", now_s) if wait is None else (wait.what(), wait.since_s)
        waited_s = now_s - since_s
        shown = ("", 0.0) if wait is None or waited_s < wait.note_after_s else (what, since_s)
        if shown != self._shown:
            self._shown = shown
            self._reports.note_wait(*shown)
        if wait is None:
            return
        is_in_device = wait is self._in_device
        if is_in_device and self.failure is None and waited_s >= self.timeout_s:
            error = too_long(self.name_of(self.rank), waited_s, what)
            story = f"{type(error).__name__}: {error}"
            self._note(RemoteStageError(self.ranks[self.rank], story))
            self._reports.end_process(error)
        elif is_in_device and self.failure is not None:
            if now_s - max(wait.since_s, self._failed_s) >= _STUCK_AFTER_S:
                self._reports.end_process(self.failure)
        elif waited_s >= wait.next_stall_s:
            wait.next_stall_s *= 2
            self._reports.stalled(what, waited_s)

    def _wait_for_device(self, now_s: float) -> Wait | None:
        """Return the main thread's wait for its device: it does not move, transfers are queued."""
        before, self._in_device = self._in_device, None
        peers = self._reports.busy_with()
        frame = sys._current_frames().get(self._main) if peers else None
        if frame is None:
            return None
        place = id(frame), frame.f_lasti, self._num_waits
        if before is not None and before.place == place:
            self._in_device = before
        else:
            what = f"its device, in transfers with ranks {[self.ranks[peer] for peer in peers]}"
            stall_s = self._stall_timeout_s
            self._in_device = Wait(lambda: what, now_s, stall_s, stall_s, place)
        return self._in_device


def too_long(name: str, waited_s: float, what: str) -> WaitTimeoutError:
    """Return the error for a wait of a rank that exceeds ``timeout_s``."""
    return WaitTimeoutError(
        f"{name} has waited {waited_s:.1f} s for {what}; if that is not a fault, give Stage a "
        "larger timeout_s"
    )
