"""A process that waits for its device in native code ends when a peer has failed.

The device is a lock: waiting for it runs native code. What ends the process releases it here.
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
from procpipe.job import device_waits
from procpipe.job.device_waits import DeviceWaits


class Device:
    """A device that waits for transfers with rank 1, until the process ends."""

    def __init__(self):
        self.peers = [1]
        self.ended = threading.Lock()
        self.ended.acquire()

    def synchronize(self):
        assert self.ended.acquire(timeout=20.0), "the process was not ended"

    def queued_with(self):
        return self.peers


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
            monkeypatch.setattr(device_waits, "end_at_once", lambda who: device.ended.release())
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
    ("frames", "line"),
    [
        (failure("boom"), "procpipe: rank 0 ends, because rank 1 failed"),
        (frame(3, b"x" * 1000) + failure("boom"), "procpipe: rank 0 ends, because rank 1 failed"),
        (failure("it is gone", is_lost=True), "procpipe: rank 0 ends, because it is gone"),
        (None, "procpipe: rank 0 ends, because rank 1 ended without a message"),
        (frame(GOODBYE), "procpipe: rank 0 ends, because rank 1 has left the pipeline"),
    ],
)
def test_a_process_that_waits_for_its_device_ends_when_a_peer_fails(
    watched, frames, line, monkeypatch, capsys
):
    monkeypatch.setattr(device_waits, "_LEFT_AFTER_S", 0.06)
    _, device, peer = watched()
    if frames is None:
        peer.close()
    else:
        peer.sendall(frames)

    device.synchronize()

    assert capsys.readouterr().err.startswith(line)


def test_a_peer_may_leave_while_this_device_has_seconds_to_compute(watched):
    assert LEFT_AFTER_S >= 30 * STUCK_AFTER_S
    _, device, peer = watched()
    peer.sendall(frame(GOODBYE))
    computed = threading.Event()
    threading.Timer(6 * device_waits._STUCK_AFTER_S, computed.set).start()

    assert computed.wait(20.0)
    assert not device.ended.acquire(blocking=False)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_process_without_transfers_or_connections_is_not_ended(watched, is_closed):
    mesh, device, peer = watched()
    if is_closed:
        mesh.close()
    else:
        device.peers = []
    peer.close()

    time.sleep(0.15)  # in native code, for longer than the watch needs

    assert not device.ended.acquire(blocking=False)


def test_stalls_are_reported_and_end_the_process_after_the_timeout(watched, capsys):
    reports = Recorder()
    _, device, peer = watched(timeout_s=1.0, stall_timeout_s=0.05, reports=reports)

    device.synchronize()

    waits = "waits for its device, in transfers with ranks [1]"
    assert reports.lines[:4] == [waits, "stalls", waits, "stalls"]
    assert "rank 0 ends, because rank 0 has waited 1.0 s for its device" in capsys.readouterr().err
    assert b"WaitTimeoutError" in peer.recv(1 << 16)
