"""What the monitor makes of events: of peers, of waits, and of a main thread that is stuck."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from typing import Any

import pytest

from procpipe.channel.monitor import FAILURE, GOODBYE, LOST, Monitor
from procpipe.errors import PeerLostError, RemoteStageError
from tests.channel.meshes import HEADER, Recorded, frame, is_readable, pair


class Watched:
    """The monitor of rank 0, with two peers that the test plays."""

    def __init__(self, timeout_s=100.0, stall_timeout_s=8.0):
        self.reports: Any = Recorded()
        self.monitor = Monitor(
            0, self.reports, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        )
        self.process = subprocess.Popen(["sleep", "60"])  # that of rank 1
        self.alarms = {}
        for peer, process in ((1, os.pidfd_open(self.process.pid)), (2, None)):
            ours, self.alarms[peer] = pair()
            self.monitor.add(peer, ours, process)

    def play(self, event):
        """Make one thing happen, and wait until the thread has handled it."""
        what, _, of = event.partition(" of ")
        alarm: Any = self.alarms.get(int(of)) if of.isdigit() else None
        if what == "failure":
            alarm.send(failure(int(of), f"boom on {of}"))
        elif what == "goodbye":
            alarm.send(frame(GOODBYE))
        elif what == "end":
            alarm.close()
        elif what == "process ends":
            self.process.kill()
            self.process.wait()
        elif what == "our failure":
            self.monitor.fail(RemoteStageError(0, "ours"))
        elif what == "our goodbye":
            self.monitor.leave()
        self.settle()

    def settle(self):
        """Wait until the thread has polled after this call began, and handled what it saw."""
        for _ in range(2):  # the first may be done after an earlier poll
            polled = threading.Event()
            busy_with = self.reports.busy_with
            self.reports.busy_with = lambda polled=polled: polled.set() or []
            self.monitor._wake()
            assert polled.wait(20.0)
            self.reports.busy_with = busy_with

    def sent_to(self, peer):
        """Return what a peer was sent: failures as (rank, story), and goodbyes."""
        try:
            data = self.alarms[peer].recv(1 << 16)
        except OSError:  # nothing, or closed
            return []
        sent = []
        while data:
            size, rank, kind, _ = HEADER.unpack_from(data)
            body, data = data[HEADER.size : HEADER.size + size], data[HEADER.size + size :]
            sent.append("goodbye" if kind == GOODBYE else (rank, body.decode()))
        return sent

    def close(self):
        self.monitor.close()
        self.process.kill()
        self.process.wait()
        for alarm in self.alarms.values():
            alarm.close()


def failure(rank, story):
    return frame(FAILURE, story.encode(), rank)


@pytest.fixture
def watched():
    watched = Watched()
    yield watched
    watched.close()


BOOM, OURS = (1, "boom on 1"), (0, "ours")
ENDED = (
    1,
    "rank 1 ended without a message: it was killed (out of memory?) or crashed; see its own output "
    "and the launcher's exit code; rank 1 was seen in F3",
)


@pytest.mark.parametrize(
    ("events", "found", "sent_to_2"),
    [
        ("failure of 1", BOOM, [BOOM]),
        ("end of 1", ENDED, [ENDED]),
        # A child may keep the sockets open.
        ("process ends", ENDED, [ENDED]),
        # Only the first counts.
        ("failure of 1, end of 1", BOOM, [BOOM]),
        ("failure of 2, failure of 1", (2, "boom on 2"), [(2, "boom on 2")]),
        ("our failure, our failure, failure of 1", OURS, [OURS]),
        ("failure of 1, our failure", BOOM, [BOOM]),
        # A peer may leave, then its socket and its process end.
        ("goodbye of 1", None, []),
        ("goodbye of 1, end of 1, process ends", None, []),
        ("goodbye of 1, process ends, end of 1", None, []),
        ("goodbye of 1, failure of 1", BOOM, [BOOM]),
        ("goodbye of 2, failure of 1", BOOM, []),
        # After this rank's goodbye nothing of its peers matters.
        ("our goodbye, end of 1", None, ["goodbye"]),
        ("our goodbye, failure of 1, our failure", None, ["goodbye"]),
        ("failure of 1, our goodbye", BOOM, [BOOM]),
    ],
)
def test_events_of_peers(watched, events, found, sent_to_2):
    for event in events.split(", "):
        watched.play(event)

    error = watched.monitor.failure
    if found is None:
        assert error is None
    else:
        assert (error.rank, error.story) == found
        assert type(error) is (PeerLostError if found is ENDED else RemoteStageError)
    assert is_readable(watched.monitor.wakes_main, 0.0) == (found is not None)
    assert watched.sent_to(2) == sent_to_2


@pytest.mark.parametrize(
    ("kind", "error_type"), [(FAILURE, RemoteStageError), (LOST, PeerLostError)]
)
def test_a_failure_is_passed_on_as_it_came(watched, kind, error_type):
    sent = frame(kind, "what a \ud800 says".encode(errors="surrogatepass"), 3)

    watched.alarms[1].send(sent)
    watched.settle()

    error = watched.monitor.failure
    assert (type(error), error.rank, error.story) == (error_type, 3, "what a \ud800 says")
    assert watched.alarms[2].recv(1000) == sent


def test_a_fault_of_the_thread_is_a_failure(watched, monkeypatch):
    """Symptom: from then on no end of a peer was noticed."""
    monkeypatch.setattr(watched.reports, "last_seen", lambda peer: [][peer])

    watched.alarms[1].close()

    assert is_readable(watched.monitor.wakes_main)
    assert watched.monitor.failure.rank == 0
    assert "IndexError: list index out of range" in watched.monitor.failure.story
    assert watched.sent_to(2)[0][0] == 0


# -- the main thread -----------------------------------------------------------------------------


class MainThread(threading.Thread):
    """Makes a monitor; later it does one thing after another, between which it stands still."""

    def __init__(self, reports):
        super().__init__(daemon=True)
        self.reports = reports
        self.acts: Any = queue.SimpleQueue()
        self.done: Any = queue.SimpleQueue()
        self.start()
        self.monitor = self.done.get()

    def run(self):
        self.done.put(Monitor(0, self.reports, timeout_s=100.0, stall_timeout_s=8.0))
        for act in iter(self.acts.get, None):
            self.done.put(act())

    def do(self, act):
        self.acts.put(act)
        self.done.get()


@pytest.fixture
def main():
    main = MainThread(Recorded())
    yield main
    main.acts.put(None)
    main.join()
    main.monitor.close()


def looked(main, *times_s):
    """Let the monitor look at the main thread at these times; return all new reports."""
    for time_s in times_s:
        main.monitor._look_at_main(time_s)
    notes, main.reports.notes = main.reports.notes, []
    return notes


def test_a_long_wait_is_reported_again_after_twice_the_time(main):
    for _ in range(2):
        names = ["rank 2", "rank 1"]  # what is waited for may change
        main.do(lambda names=names: main.monitor.start_wait(lambda: names[-1], 1000.0))
        assert looked(main, 1000.0, 1000.01) == []
        assert looked(main, 1000.1, 1007.9) == ["waits for rank 1"]
        assert looked(main, 1008.0, 1009.0, 1015.9) == ["has waited 8 s for rank 1"]
        names.pop()
        assert looked(main, 1016.5, 1017.0) == ["waits for rank 2", "has waited 16.5 s for rank 2"]
        main.do(main.monitor.end_wait)
        assert looked(main, 1017.0, 1100.0) == ["waits no more"]


TRANSFERS = "its device, in transfers with ranks [2]"


def test_a_main_thread_that_stands_still_with_transfers_queued_is_stuck(main):
    main.reports.busy = [2]

    assert looked(main, 1000.0, 1007.0) == []
    assert looked(main, 1008.0, 1015.0) == [
        f"waits for {TRANSFERS}",
        f"has waited 8 s for {TRANSFERS}",
    ]
    main.reports.busy = []
    assert looked(main, 1016.0, 1017.0) == ["waits no more"]
    main.reports.busy = [2]
    assert looked(main, 2000.0, 2007.0) == []
    assert main.monitor.failure is None
    assert looked(main, 2100.0) == [
        f"waits for {TRANSFERS}",
        f"ends: WaitTimeoutError: rank 0 has waited 100.0 s for {TRANSFERS}; if that is not a "
        "fault, give Stage a larger timeout_s",
    ]
    assert "WaitTimeoutError: rank 0 has waited 100.0 s for its d" in str(main.monitor.failure)


@pytest.mark.parametrize(
    ("what", "ends"),
    [
        ("stands still", True),
        ("nothing is queued", False),
        ("moves", False),
        ("waits for a frame", False),
        ("no failure", False),
    ],
)
def test_after_a_failure_a_process_that_is_stuck_is_ended(main, monkeypatch, what, ends):
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    main.reports.busy = [] if what == "nothing is queued" else [2]
    if what != "no failure":
        main.monitor.fail(RemoteStageError(1, "boom"))
    for now_s in (1000.0, 1000.5, 1000.9):
        assert looked(main, now_s) == []
    if what == "moves":
        main.do(lambda: main.monitor.start_wait(lambda: "", now_s))
        main.do(main.monitor.end_wait)
    if what == "waits for a frame":
        main.do(lambda: main.monitor.start_wait(lambda: "a frame", now_s))

    notes = [note for note in looked(main, 1001.1) if note.startswith("ends")]
    assert notes == (["ends: RemoteStageError: rank 1 failed:\nboom"] if ends else [])
