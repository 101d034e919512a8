"""Framed messages between ranks, over socket pairs in one process."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import struct
import threading
import time

import pytest

from procpipe.channel.mesh import FAILURE, Mesh
from procpipe.channel.native_waits import WaitReports
from procpipe.errors import PeerLostError, RemoteStageError, WaitTimeoutError

HEADER = struct.Struct("<QIBB")


@pytest.fixture
def net():
    """Return a function that makes connected meshes, which are closed at the end."""
    made = []

    def make(num_ranks, **options):
        sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
        for a in range(num_ranks):
            for b in range(a):
                sockets[a][b], sockets[b][a] = socket.socketpair()
        for ours in sockets:
            for sock in ours.values():
                sock.setblocking(False)
        meshes = [make_mesh(rank, sockets[rank], **options) for rank in range(num_ranks)]
        made.extend(meshes)
        return meshes

    yield make
    for each in made:
        each.close()


@pytest.fixture
def wired(net):
    """The mesh of rank 1, whose peer 0 is a plain socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    mesh = make_mesh(1, {0: ours})
    yield mesh, theirs
    mesh.close()
    theirs.close()


def make_mesh(rank, sockets, timeout_s=5.0, stall_timeout_s=5.0, reports=None):
    return Mesh(
        rank,
        sockets,
        timeout_s=timeout_s,
        stall_timeout_s=stall_timeout_s,
        reports=reports or WaitReports(),
    )


def received_by(mesh, peer, kind):
    """Return a list to which all frames of a kind from a peer are appended."""
    received = []

    def append(sequence, flags, body):
        received.append((sequence, flags, bytes(body)))

    mesh.on(peer, kind, append)
    return received


def frame(kind, body=b"", sequence=0, flags=0):
    return HEADER.pack(len(body), sequence, kind, flags) + body


def nothing():
    return "nothing"


# -- frames ---------------------------------------------------------------------------------------


def test_a_frame_arrives_as_it_was_sent(net):
    a, b = net(2)
    received = received_by(b, 0, 7)

    a.send(1, 7, 3, 0xFFFFFFFF, b"ab", bytearray(b"cd"), memoryview(b"ef"))
    a.send(1, 7, 0, 0)
    b.wait(lambda: len(received) == 2, nothing)

    assert received == [(0xFFFFFFFF, 3, b"abcdef"), (0, 0, b"")]


def test_frames_are_dispatched_by_peer_and_type(net):
    a, b, c = net(3)
    received = [received_by(c, 0, 1), received_by(c, 0, 2), received_by(c, 1, 1)]

    a.send(2, 1, 0, 0, b"from 0, kind 1")
    a.send(2, 2, 0, 0, b"from 0, kind 2")
    b.send(2, 1, 0, 0, b"from 1, kind 1")
    c.wait(lambda: all(received), nothing)

    bodies = [frames[0][2] for frames in received]
    assert bodies == [b"from 0, kind 1", b"from 0, kind 2", b"from 1, kind 1"]
    assert (a.peers, b.peers, c.peers) == ((1, 2), (0, 2), (0, 1))


def test_frames_may_arrive_byte_by_byte(wired):
    mesh, peer = wired
    received = received_by(mesh, 0, 7)

    for byte in frame(7, b"hello", 5) + frame(7) + frame(7, b"!", 6, 1):
        peer.sendall(bytes([byte]))
        mesh.poll()

    assert received == [(5, 0, b"hello"), (0, 0, b""), (6, 1, b"!")]


def test_frames_may_arrive_split_anywhere(wired):
    mesh, peer = wired
    received = received_by(mesh, 0, 7)
    draw = random.Random(0)
    bodies = [draw.randbytes(draw.choice([0, 1, 10, 5000, 400_000])) for _ in range(40)]
    stream = b"".join(frame(7, body, k) for k, body in enumerate(bodies))

    position = 0
    while position < len(stream):
        size = draw.choice([1, 9, 10, 11, 4096, 100_000])
        peer.sendall(stream[position : position + size])
        position += size
        mesh.poll()

    assert [body for _, _, body in received] == bodies
    assert [sequence for sequence, _, _ in received] == list(range(40))


def test_many_frames_in_one_read(wired):
    mesh, peer = wired
    received = received_by(mesh, 0, 7)

    peer.sendall(b"".join(frame(7, b"x", k) for k in range(1000)))
    mesh.poll()

    assert [sequence for sequence, _, _ in received] == list(range(1000))


def test_an_early_frame_is_kept_for_its_handler(net):
    a, b = net(2)
    order = received_by(b, 0, 1)

    a.send(1, 7, 0, 0, b"early")
    a.send(1, 7, 1, 1, b"too")
    a.send(1, 1, 0, 0)
    b.wait(lambda: order, nothing)
    received = received_by(b, 0, 7)
    a.send(1, 7, 0, 2, b"late")
    b.wait(lambda: len(received) == 3, nothing)

    assert received == [(0, 0, b"early"), (1, 1, b"too"), (2, 0, b"late")]


def test_a_body_may_be_written_to(net):
    a, b = net(2)
    received = []
    b.on(0, 7, lambda sequence, flags, body: received.append((body.readonly, len(body))))

    a.send(1, 7, 0, 0, b"small")
    a.send(1, 7, 0, 0, bytes(1 << 20))
    flushing = threading.Thread(target=a.flush)
    flushing.start()
    b.wait(lambda: len(received) == 2, nothing)
    flushing.join()

    assert received == [(False, 5), (False, 1 << 20)]


def test_more_parts_than_one_system_call_takes(net):
    """``sendmsg`` takes 1,024 buffers on Linux: with one more the frame was lost."""
    a, b = net(2)
    received = received_by(b, 0, 7)

    for num_parts in (1022, 1023, 1024, 1025, 5000):
        a.send(1, 7, 0, 0, *[b"x"] * num_parts)
    b.wait(lambda: len(received) == 5, nothing)

    assert [len(body) for _, _, body in received] == [1022, 1023, 1024, 1025, 5000]


# -- full sockets ---------------------------------------------------------------------------------


def test_sending_never_blocks_and_keeps_a_copy(net):
    a, b = net(2)
    received = received_by(b, 0, 7)
    content = bytearray(b"\x01") * (1 << 20)

    for k in range(20):
        a.send(1, 7, 0, k, content)
        content[:] = bytes([k + 2]) * len(content)  # the parts may be reused at once
    assert a.has_unsent(1)
    sender = threading.Thread(target=a.flush)
    sender.start()
    b.wait(lambda: len(received) == 20, nothing)
    sender.join()

    assert not a.has_unsent(1)
    assert [(k, len(body), {*body}) for k, _, body in received] == [
        (k, 1 << 20, {k + 1}) for k in range(20)
    ]


def test_two_ranks_that_fill_each_others_sockets(net):
    a, b = net(2)
    received = [received_by(a, 1, 7), received_by(b, 0, 7)]
    for _ in range(20):
        a.send(1, 7, 0, 0, bytes(1 << 20))
        b.send(0, 7, 0, 0, bytes(1 << 20))

    def read_all_and_write_all(mesh, frames):
        mesh.wait(lambda: len(frames) == 20, nothing)
        mesh.flush()  # the first to receive everything still has frames to send

    thread = threading.Thread(target=read_all_and_write_all, args=(a, received[0]))
    thread.start()
    read_all_and_write_all(b, received[1])
    thread.join()

    assert [len(frames) for frames in received] == [20, 20]


def test_flush_of_nothing_returns(net):
    a, _ = net(2)

    a.flush()


# -- waiting --------------------------------------------------------------------------------------


def test_waiting_for_a_true_condition_reads_nothing(wired):
    mesh, peer = wired
    peer.close()

    mesh.wait(lambda: True, nothing)


def test_a_timeout_error_has_the_rank_the_time_and_the_message(net):
    _, b = net(2, timeout_s=0.05)

    with pytest.raises(WaitTimeoutError) as caught:
        b.wait(lambda: False, lambda: "activation 3 from stage 0 (rank 0)")

    text = str(caught.value)
    assert re.match(r"rank 1 has waited \d+\.\d s for activation 3 from stage 0 \(rank 0\)", text)
    assert "timeout_s" in text
    assert isinstance(caught.value, TimeoutError)


def test_the_time_in_which_a_peer_is_busy_does_not_count(net):
    a, b, c = net(3, timeout_s=0.1)
    begun = time.monotonic()

    def has_waited_long():
        return time.monotonic() - begun > 0.3

    a.send_busy(is_busy=True)
    c.wait(has_waited_long, nothing, every_s=0.01)  # for b, which may wait for a
    a.send_busy(is_busy=False)
    ended = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        c.wait(lambda: False, nothing)
    assert time.monotonic() - ended >= 0.1
    a.close()
    b.send_busy(is_busy=True)  # to those that are left
    assert not a.is_connected(1)


def test_a_stall_is_reported_again_after_twice_the_time(net):
    recorded = Recorded()
    _, b = net(2, timeout_s=0.5, stall_timeout_s=0.05, reports=recorded)

    with pytest.raises(WaitTimeoutError):
        b.wait(lambda: False, lambda: "something")

    assert {what for what, _ in recorded.stalls} == {"something"}
    assert len(recorded.stalls) == 4  # after 0.05, 0.1, 0.2 and 0.4 s
    for (_, waited_s), at_least_s in zip(recorded.stalls, (0.05, 0.1, 0.2, 0.4), strict=True):
        assert waited_s >= at_least_s


class Recorded(WaitReports):
    """Records all reports."""

    def __init__(self):
        self.stalls = []
        self.waits = []

    def stalled(self, what, waited_s):
        self.stalls.append((what, waited_s))

    def start_wait(self, what, since_s):
        self.waits.append(what)

    def end_wait(self):
        self.waits.append("over")

    def last_seen(self, peer):
        return f"rank {peer} was seen in F3"


def test_a_long_wait_is_reported_and_a_short_one_is_not(net):
    recorded = Recorded()
    a, b = net(2, reports=recorded)
    received = received_by(b, 0, 1)
    a.send(1, 1, 0, 0, b"at once")
    b.wait(lambda: received, lambda: "the first")
    assert recorded.waits == []

    timer = threading.Timer(0.3, lambda: a.send(1, 1, 0, 1, b"late"))
    timer.start()
    b.wait(lambda: len(received) == 2, lambda: "the second")
    timer.join()

    assert recorded.waits == ["the second", "over"]


def test_a_wait_that_fails_is_not_reported_as_ended(net):
    recorded = Recorded()
    _, b = net(2, timeout_s=0.2, reports=recorded)

    with pytest.raises(WaitTimeoutError):
        b.wait(lambda: False, lambda: "something")

    assert recorded.waits == ["something"]


def test_the_error_has_the_place_where_a_dead_peer_was_last_seen():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    mesh = make_mesh(1, {0: ours}, reports=Recorded())
    theirs.close()

    with pytest.raises(PeerLostError, match=r"ended without a message.*; rank 0 was seen in F3"):
        mesh.wait(lambda: False, nothing)

    mesh.close()


def test_a_condition_without_frames_is_polled(net):
    _, b = net(2)
    answers = iter([False, False, False, True])
    start = time.monotonic()

    b.wait(lambda: next(answers), nothing, every_s=0.001)

    assert time.monotonic() - start < 4.0  # else 5 s


# -- endings --------------------------------------------------------------------------------------


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

    assert time.monotonic() - start < 4.0  # else 5 s


def test_closing_sends_a_goodbye_after_unsent_frames(net):
    a, b = net(2)
    received = received_by(b, 0, 7)
    for _ in range(20):
        a.send(1, 7, 0, 0, bytes(1 << 20))
    closing = threading.Thread(target=lambda: (a.flush(), a.close()))
    closing.start()

    b.wait(lambda: len(received) == 20, nothing, peer=0)
    closing.join()

    with pytest.raises(PeerLostError, match="has left"):
        b.wait(lambda: False, nothing, peer=0)


def test_closing_does_not_wait_for_a_peer_that_has_ended(net):
    a, b = net(2)
    for _ in range(20):
        a.send(1, 7, 0, 0, bytes(1 << 20))
    for sock in (each.sock for each in b._connections.of.values()):
        sock.shutdown(socket.SHUT_RDWR)
    start = time.monotonic()

    a.close()

    assert time.monotonic() - start < 4.0  # else 5 s


def test_a_mesh_may_be_closed_twice(net):
    a, _ = net(2)
    a.close()
    a.close()


def test_a_mesh_of_one_rank():
    alone = make_mesh(0, {})

    alone.poll()
    alone.flush()
    alone.wait(lambda: True, nothing)
    alone.send_failure(RemoteStageError(0, "without peers"))
    alone.close()
    assert alone.peers == ()


def test_no_socket_is_left_open(net):
    before = len(os.listdir("/proc/self/fd"))
    a, b = net(2)
    a.close()
    with pytest.raises(PeerLostError):
        b.wait(lambda: False, nothing, peer=0)
    b.close()

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_frame_may_be_longer_than_4_gib(wired):
    """Symptom: struct.error when one was sent."""
    mesh, peer = wired
    received = received_by(mesh, 0, 7)

    peer.sendall(HEADER.pack(5 << 30, 0xFFFFFFFF, 7, 0) + b"its first bytes")
    mesh.poll()

    peer.sendall(frame(7, b"whole"))  # part of the long frame's body
    mesh.poll()

    assert received == []


def test_a_peer_may_end_without_a_goodbye_after_receiving_one(net):
    first, second = net(2)
    first.part(0.0)
    second.poll()
    second.close()
    first.part(5.0)
    first.poll()
