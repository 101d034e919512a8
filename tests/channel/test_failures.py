"""What a wait raises when a peer fails, ends or leaves."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import pytest

from procpipe.channel.mesh import FAILURE
from procpipe.errors import PeerLostError, RemoteStageError
from tests.channel.meshes import Recorded, frame, make_mesh, nothing, received_by


def test_the_error_has_the_place_where_a_dead_peer_was_last_seen():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    mesh = make_mesh(1, {0: ours}, reports=Recorded())
    theirs.close()

    with pytest.raises(PeerLostError, match=r"ended without a message.*; rank 0 was seen in F3"):
        mesh.wait(lambda: False, nothing)

    mesh.close()


def test_a_killed_peer_is_named(net):
    a, b, c = net(3)
    for sock in (
        each.sock for each in a._connections.of.values()
    ):  # as the kernel does when a process is killed
        sock.shutdown(socket.SHUT_RDWR)

    for survivor in (b, c):
        with pytest.raises(PeerLostError, match="rank 0 ended without a message") as caught:
            survivor.wait(lambda: False, nothing)
        assert caught.value.rank == 0


def test_frames_before_the_end_are_delivered_first(wired):
    mesh, peer = wired
    received = received_by(mesh, 0, 7)
    peer.sendall(frame(7, b"last words"))
    peer.close()

    mesh.wait(lambda: received, nothing)

    assert received == [(0, 0, b"last words")]
    with pytest.raises(PeerLostError):
        mesh.wait(lambda: False, nothing)


def test_the_end_in_the_middle_of_a_frame_is_a_loss(wired):
    mesh, peer = wired
    received = received_by(mesh, 0, 7)
    peer.sendall(frame(7, b"cut off")[:-1])
    peer.close()

    with pytest.raises(PeerLostError):
        mesh.wait(lambda: received, nothing)
    assert received == []


def test_a_reset_connection_is_a_loss():
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    ours.setblocking(False)
    mesh = make_mesh(1, {0: ours})
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()  # sends RST

    with pytest.raises(PeerLostError, match="rank 0"):
        mesh.wait(lambda: False, nothing)
    mesh.close()


def test_a_goodbye_is_no_fault_unless_a_rank_waits_for_that_peer(net):
    a, b, c = net(3)
    received = received_by(c, 1, 7)
    a.close()
    b.send(2, 7, 0, 0, b"still here")

    c.wait(lambda: received, nothing, peer=1)  # rank 1 has not left

    with pytest.raises(PeerLostError) as caught:
        c.wait(lambda: False, lambda: "the order for step()", peer=0)
    text = str(caught.value)
    assert caught.value.rank == 0
    assert "rank 0 has left the pipeline" in text
    assert "while rank 2 waits for the order for step()" in text


def test_a_condition_may_become_true_after_a_goodbye(net):
    a, b = net(2)
    a.close()
    answers = iter([False] * 20 + [True] * 2)

    b.wait(lambda: next(answers), nothing, peer=0, every_s=0.001, grace_s=10.0)

    with pytest.raises(PeerLostError, match="rank 0 has left"):
        b.wait(lambda: False, nothing, peer=0, every_s=0.001, grace_s=0.01)


def test_a_failure_behind_an_error_may_be_known_already(wired):
    """The only peer is gone: its end was read before the error that is looked into."""
    mesh, peer = wired
    peer.close()
    mesh.wait(lambda: not mesh._connections.of, lambda: "its end")
    with pytest.raises(PeerLostError, match="rank 0 ended without a message"):
        mesh.wait_failure()


def test_the_failure_behind_an_error_may_be_that_a_peer_has_left(net):
    one, other = net(2)
    other.close()
    with pytest.raises(PeerLostError, match=r"rank 1 has left .* while rank 0 adds up"):
        one.wait_failure([1], "adds up")


def test_sending_to_a_peer_that_has_left_is_a_fault(net):
    a, b = net(2)
    received = received_by(b, 0, 7)
    a.send(1, 7, 0, 0)
    a.close()
    b.wait(lambda: received, nothing)
    b.poll()

    with pytest.raises(PeerLostError, match=r"rank 0 has left the pipeline .* while rank 1 sends"):
        b.send(0, 7, 0, 0)


def test_frames_before_a_goodbye_are_delivered(net):
    a, b = net(2)
    received = received_by(b, 0, 7)
    a.send(1, 7, 0, 0, b"the loss")
    a.close()

    b.wait(lambda: received, nothing, peer=0)

    assert received == [(0, 0, b"the loss")]


def test_a_failure_is_forwarded_to_all_ranks():
    (a1, b0), (b2, c1) = socket.socketpair(), socket.socketpair()
    for sock in (a1, b0, b2, c1):
        sock.setblocking(False)
    # Rank 2 is not connected to rank 0.
    meshes = a, b, c = make_mesh(0, {1: a1}), make_mesh(1, {0: b0, 2: b2}), make_mesh(2, {1: c1})
    a.send_failure(RemoteStageError(0, "the story"))

    with pytest.raises(RemoteStageError) as first:
        b.wait(lambda: False, nothing)
    with pytest.raises(RemoteStageError) as second:
        c.wait(lambda: False, nothing)

    for caught in (first, second):
        assert type(caught.value) is RemoteStageError
        assert (caught.value.rank, caught.value.story) == (0, "the story")
        assert str(caught.value) == "rank 0 failed:\nthe story"
    for each in meshes:
        each.close()


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_forwarded_loss_of_a_peer_is_a_peer_lost_error(how):
    (a1, b0), (b2, c1) = socket.socketpair(), socket.socketpair()
    for sock in (a1, b0, b2, c1):
        sock.setblocking(False)
    meshes = a, b, c = make_mesh(0, {1: a1}), make_mesh(1, {0: b0, 2: b2}), make_mesh(2, {1: c1})
    if how == "killed":
        a1.shutdown(socket.SHUT_RDWR)
    else:
        a.close()
    with pytest.raises(PeerLostError):
        b.wait(lambda: False, nothing, peer=0)

    with pytest.raises(PeerLostError, match="killed" if how == "killed" else "has left") as caught:
        c.wait(lambda: False, nothing)

    assert caught.value.rank == 0  # not rank 1, which ended because of it
    for each in meshes:
        each.close()


def test_a_failure_is_sent_once(net):
    a, b = net(2)
    a.send_failure(RemoteStageError(0, "first"))
    a.send_failure(RemoteStageError(0, "second"))
    a.close()

    with pytest.raises(RemoteStageError, match="first"):
        b.wait(lambda: False, nothing)
    with pytest.raises(RemoteStageError, match="first"):
        b.poll()


def test_the_first_failure_wins(wired):
    mesh, peer = wired
    peer.sendall(
        frame(FAILURE, json.dumps({"rank": 2, "story": "first", "is_lost": False}).encode())
    )
    peer.sendall(
        frame(FAILURE, json.dumps({"rank": 3, "story": "second", "is_lost": False}).encode())
    )
    peer.close()

    with pytest.raises(RemoteStageError, match="first") as caught:
        mesh.wait(lambda: False, nothing)
    assert caught.value.rank == 2


def test_received_frames_are_handled_before_a_failure_is_raised(net):
    """Rank 0 sends a disagreement to all ranks and then fails: all must receive it first."""
    a, b = net(2)
    received = received_by(b, 0, 7)
    a.send(1, 7, 0, 0, b"what is wrong")
    a.send_failure(RemoteStageError(0, "it is wrong"))

    b.wait(lambda: received, nothing)

    assert received == [(0, 0, b"what is wrong")]
    with pytest.raises(RemoteStageError):
        b.poll()


def test_a_failure_overtakes_unsent_frames(net):
    """A rank that failed while it was ahead of a busy peer is not reported as killed."""
    a, b = net(2)
    received = received_by(b, 0, 7)
    for _ in range(100):
        a.send(1, 7, 0, 0, bytes(1 << 20))
    failing = threading.Thread(
        target=lambda: (a.send_failure(RemoteStageError(0, "the story")), a.close())
    )
    failing.start()

    with pytest.raises(RemoteStageError) as caught:
        b.wait(lambda: len(received) == 100, nothing)
    failing.join()

    assert type(caught.value) is RemoteStageError, str(caught.value)
    assert caught.value.story == "the story"
    assert all(body == bytes(1 << 20) for _, _, body in received)


def test_a_peer_that_does_not_read_cannot_block_a_failing_rank(net, monkeypatch):
    monkeypatch.setattr("procpipe.channel.mesh._LAST_FRAME_TIMEOUT_S", 0.05)
    a, b = net(2)
    for _ in range(100):
        a.send(1, 7, 0, 0, bytes(1 << 20))
        b.send(0, 7, 0, 0, bytes(1 << 20))
    start = time.monotonic()

    a.send_failure(RemoteStageError(0, "the story"))

    assert time.monotonic() - start < 4.0  # 5 s where the limit above is not used


def test_a_peer_may_end_without_a_goodbye_after_receiving_one(net):
    first, second = net(2)
    first.part(0.0)
    second.poll()
    second.close()
    first.part(5.0)
    first.poll()
