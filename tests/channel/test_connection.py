"""Frames over one socket: in parts, many at once, and where the socket is full."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest

from procpipe.errors import PeerLostError
from tests.channel.meshes import HEADER, frame, nothing, received_by


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


def test_a_frame_may_be_longer_than_4_gib(wired):
    """Symptom: struct.error when one was sent."""
    mesh, peer = wired
    received = received_by(mesh, 0, 7)

    peer.sendall(HEADER.pack(5 << 30, 0xFFFFFFFF, 7, 0) + b"its first bytes")
    mesh.poll()

    peer.sendall(frame(7, b"whole"))  # part of the long frame's body
    mesh.poll()

    assert received == []


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

    assert time.monotonic() - start < 4.0  # 5 s (_LAST_FRAME_TIMEOUT_S) if it waits


def test_no_socket_is_left_open(net):
    before = len(os.listdir("/proc/self/fd"))
    a, b = net(2)
    a.close()
    with pytest.raises(PeerLostError):
        b.wait(lambda: False, nothing, peer=0)
    b.close()

    assert len(os.listdir("/proc/self/fd")) == before
