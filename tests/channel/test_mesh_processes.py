"""The end of a peer's process is detected even while its child has the socket open."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys

import pytest
from tests.test_forks import in_child

from procpipe.channel import sockets
from procpipe.channel.mesh import FAILURE, GOODBYE, Mesh
from procpipe.channel.native_waits import WaitReports
from procpipe.channel.sockets import open_process
from procpipe.errors import PeerLostError, RemoteStageError, StageClosedError

pytestmark = pytest.mark.dist

HEADER = struct.Struct("<QIBB")

#: A peer connects, sends the content of a file, and forks a child as native code does.
PEER = """
import ctypes, os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
sock.sendall(open(sys.argv[2], "rb").read())
if ctypes.CDLL(None).fork() == 0:
    sys.stdin.read()  # until the test has ended
else:
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def peer(tmp_path):
    """Start a peer that has sent some bytes; return its process and a mesh connected to it."""
    processes, meshes = [], []

    def start(message=b""):
        path, message_path = str(tmp_path / "socket"), tmp_path / "message"
        message_path.write_bytes(message)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, "-c", PEER, path, str(message_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            processes.append(process)
            sock, _ = listener.accept()
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        sock.setblocking(False)
        mesh = Mesh(1, {0: sock}, timeout_s=5.0, stall_timeout_s=5.0, reports=WaitReports())
        meshes.append(mesh)
        return process, mesh

    yield start
    for mesh in meshes:
        mesh.close()
    for process in processes:
        process.kill()
        process.communicate()


def frame(kind, body=b""):
    return HEADER.pack(len(body), 0, kind, 0) + body


def nothing():
    return "nothing"


@pytest.mark.parametrize("has_peerpidfd", [True, False])
def test_a_killed_peer_whose_child_lives(peer, monkeypatch, has_peerpidfd):
    if not has_peerpidfd:
        monkeypatch.setattr(sockets, "_SO_PEERPIDFD", 1 << 20)
    process, mesh = peer()
    os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(PeerLostError, match="rank 0 ended without a message"):
        mesh.wait(lambda: False, nothing)


def test_frames_of_a_killed_peer_are_delivered(peer, monkeypatch):
    monkeypatch.setattr("procpipe.channel.connection._READ_BYTES", 1 << 14)
    received = []
    story = {"rank": 0, "story": "boom", "is_lost": False}
    frames = b"".join(frame(3, bytes(40_000)) for _ in range(2))
    process, mesh = peer(frames + frame(FAILURE, json.dumps(story).encode()))
    mesh.on(0, 3, lambda sequence, flags, body: received.append(len(body)))
    os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(RemoteStageError, match="rank 0 failed:\nboom") as caught:
        mesh.wait(lambda: False, nothing)
    assert not isinstance(caught.value, PeerLostError)
    assert received == [40_000] * 2


def test_a_goodbye_before_the_end_is_no_loss(peer):
    process, mesh = peer(frame(GOODBYE))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    mesh.poll(1.0)

    mesh.poll()
    assert not mesh.is_connected(0)


def test_a_process_that_cannot_be_opened_is_no_error(peer, monkeypatch):
    monkeypatch.setattr(sockets, "_SO_PEERPIDFD", 1 << 20)

    def refuse(pid):
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    _, mesh = peer()

    assert [each.process for each in mesh._connections.of.values()] == [None]
    mesh.poll()


def test_all_descriptors_are_closed(peer):
    before = os.listdir("/proc/self/fd")
    _, mesh = peer()
    mesh.close()

    # The test itself holds two pipes of the peer's process.
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2


def test_only_processes_of_this_host_are_opened():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as link,
    ):
        assert open_process(link) is None


def test_a_forked_child_cannot_send_for_its_parent():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    mesh = Mesh(1, {0: ours}, timeout_s=5.0, stall_timeout_s=5.0, reports=WaitReports())
    mesh.send(0, 3, 0, 0, b"before")

    def send_in_child():
        for act in (
            lambda: mesh.send(0, 3, 0, 0, b"a child"),
            lambda: mesh.wait(lambda: False, nothing),
            mesh.poll,
            mesh.check_process,
        ):
            with pytest.raises(StageClosedError, match=r"was forked from that of rank 1 \("):
                act()
        mesh.send_failure(RemoteStageError(1, "a story"))
        mesh.close()
        return ours.fileno()

    assert in_child(send_in_child) == "-1"
    mesh.check_process()
    mesh.send(0, 3, 0, 0, b"after")
    mesh.close()
    with theirs:
        assert theirs.recv(1000) == frame(3, b"before") + frame(3, b"after") + frame(GOODBYE)
