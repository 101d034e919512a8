"""A wait in native code for a device is ended when a peer has failed.

The device is a lock: waiting for it runs native code, and aborting releases it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from procpipe.channel.mesh import FAILURE, GOODBYE, Mesh
from procpipe.channel.native_waits import WaitReports
from procpipe.errors import PeerLostError, RemoteStageError, WaitTimeoutError
from procpipe.job import device_waits
from procpipe.job.device_waits import DeviceWaits, abort_all


class Device:
    """A device that waits for transfers with rank 1, until they are aborted."""

    def __init__(self):
        self.peers = [1]
        self._free = threading.Lock()
        self._free.acquire()

    def synchronize(self, first=lambda: None):
        first()  # here, so that an error that comes at once is raised in this call
        assert self._free.acquire(timeout=20.0), "the wait was not ended"

    def busy_with(self):
        return self.peers

    def abort(self):
        self._free.release()
        return True


class Recorder(WaitReports):
    def __init__(self):
        self.lines: list[str] = []

    def start_wait(self, what, since_s):
        self.lines.append(f"waits for {what}")

    def end_wait(self):
        self.lines.append("continues")

    def stalled(self, what, waited_s):
        self.lines.append("stalls")


#: The limits that users have, which :func:`watched` shortens.
STUCK_AFTER_S, LEFT_AFTER_S = device_waits._STUCK_AFTER_S, device_waits._LEFT_AFTER_S


@pytest.fixture
def watched(monkeypatch):
    """Return a function that makes a mesh of rank 0, a device and rank 1's socket."""
    monkeypatch.setattr(device_waits, "_LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(device_waits, "_STUCK_AFTER_S", 0.03)
    with contextlib.ExitStack() as stack:

        def make(timeout_s=60.0, stall_timeout_s=60.0, reports=None):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            limits = {"timeout_s": timeout_s, "stall_timeout_s": stall_timeout_s}
            reports = reports or WaitReports()
            mesh, device = Mesh(0, {1: ours}, reports=reports, **limits), Device()
            watch = DeviceWaits(mesh, [device], threading.main_thread)
            stack.callback(theirs.close)
            stack.callback(mesh.close)
            stack.callback(watch.close)
            return mesh, device, theirs

        yield make


def frame(kind, body=b""):
    return len(body).to_bytes(8, "little") + bytes(4) + bytes([kind, 0]) + body


def failure(story, *, is_lost=False):
    return frame(FAILURE, json.dumps({"rank": 1, "story": story, "is_lost": is_lost}).encode())


@pytest.mark.parametrize(
    ("frames", "error", "words"),
    [
        (failure("boom"), RemoteStageError, r"^rank 1 failed:\nboom$"),
        (frame(3, b"x" * 1000) + failure("boom"), RemoteStageError, r"^rank 1 failed:\nboom$"),
        (failure("it is gone", is_lost=True), PeerLostError, r"^rank 1 failed:\nit is gone$"),
        (None, PeerLostError, r"rank 1 ended without a message"),
        (frame(GOODBYE), PeerLostError, r"rank 1 has left the pipeline .* its device, in transfer"),
    ],
)
def test_a_wait_for_the_device_ends_when_a_peer_fails(watched, frames, error, words, monkeypatch):
    monkeypatch.setattr(device_waits, "_LEFT_AFTER_S", 0.06)
    _, device, peer = watched()
    start_s = time.monotonic()

    with pytest.raises(error, match=words) as caught:
        device.synchronize(peer.close if frames is None else lambda: peer.sendall(frames))

    assert time.monotonic() < start_s + 10.0
    assert caught.type.__name__ == error.__name__
    assert caught.value.rank == 1


def test_the_error_is_raised_before_the_result_is_used(watched):
    """The device's results depend on interrupted transfers."""
    _, device, peer = watched()
    values = []

    with pytest.raises(PeerLostError):
        values.append(device.synchronize(peer.close))

    assert values == []


def test_a_peer_may_leave_while_this_device_has_seconds_to_compute(watched):
    assert LEFT_AFTER_S >= 50 * STUCK_AFTER_S > 20.0
    _, device, peer = watched()
    peer.sendall(frame(GOODBYE))
    threading.Timer(6 * device_waits._STUCK_AFTER_S, device.abort).start()

    device.synchronize()


def test_frames_read_during_the_wait_are_not_lost(watched):
    mesh, device, peer = watched()

    with pytest.raises(RemoteStageError):
        device.synchronize(lambda: peer.sendall(failure("boom")))

    with pytest.raises(RemoteStageError, match="boom"):
        mesh.poll()


@pytest.mark.parametrize("closes", [False, True])
def test_a_failure_received_with_an_awaited_frame_ends_the_next_wait(watched, closes):
    mesh, device, peer = watched()
    read: list[int] = []
    mesh.on(1, 3, lambda sequence, flags, body: read.append(sequence))
    peer.sendall(frame(3) + failure("boom"))
    if closes:
        peer.close()
    mesh.wait(lambda: read, lambda: "a frame")

    with pytest.raises(RemoteStageError, match="boom"):
        device.synchronize()


def test_a_wait_without_transfers_is_not_ended(watched):
    _, device, peer = watched()
    device.peers = []
    peer.close()

    time.sleep(0.15)  # in native code, for longer than the watch needs

    assert not device._free.acquire(blocking=False)


def test_stalls_are_reported_and_end_after_the_timeout(watched):
    reports = Recorder()
    _, device, _ = watched(timeout_s=1.0, stall_timeout_s=0.05, reports=reports)

    with pytest.raises(
        WaitTimeoutError, match=r"rank 0 has waited \d\.\d s for its device, in tran"
    ):
        device.synchronize()

    waits = "waits for its device, in transfers with ranks [1]"
    assert reports.lines[:4] == [waits, "stalls", waits, "stalls"]


def test_after_close_nothing_is_raised(watched):
    mesh, device, peer = watched()
    mesh.close()
    peer.close()

    time.sleep(0.15)  # as above

    assert not device._free.acquire(blocking=False)


def test_an_error_that_comes_while_the_watch_is_closed_is_dropped(watched, monkeypatch):
    mesh, device, _ = watched()
    watch = DeviceWaits(mesh, [device], threading.main_thread)

    class Raising:
        def __enter__(self):
            device_waits._raise_in(threading.get_ident(), PeerLostError(1, "too late"))

        def __exit__(self, *exception):
            pass

    monkeypatch.setattr(watch, "_raising", Raising())
    watch.close()

    assert watch._is_closed.is_set()


def test_transfers_of_several_transports_are_ended_together():
    """A transport that synchronises the device waits for the other's transfers."""
    both = threading.Barrier(2, timeout=20.0)

    class Waiting(Device):
        def abort(self):
            both.wait()
            return True

    assert abort_all([Waiting(), Waiting()])
    assert abort_all([])


def test_transfers_end_although_their_transports_are_closed_meanwhile():
    transports: list[Device] = []

    class Closed(Device):
        def abort(self):
            transports.clear()
            return True

    transports.append(Closed())

    assert abort_all(transports)
