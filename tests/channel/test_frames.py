"""Frames over one socket: in parts, many at once, and where the socket takes or gives little."""

from __future__ import annotations

import itertools
import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procpipe.channel.frames import Frames
from tests.channel.meshes import frame


class Narrow:
    """A socket to itself; each system call moves at most the next of ``sizes``, 0 would block."""

    def __init__(self, sizes):
        self.of_sends, self.of_reads = itertools.cycle(sizes), itertools.cycle(sizes)
        self.under_way = bytearray()

    def sendmsg(self, parts):
        parts = [*parts]
        assert len(parts) <= 1024, "IOV_MAX"
        data = b"".join(parts)[: next(self.of_sends)]
        if not data:
            raise BlockingIOError
        self.under_way += data
        return len(data)

    def recv_into(self, buffer):
        num_bytes = min(next(self.of_reads), len(buffer), len(self.under_way))
        if not num_bytes:
            raise BlockingIOError
        buffer[:num_bytes] = self.under_way[:num_bytes]
        del self.under_way[:num_bytes]
        return num_bytes


class Received(list):
    """The frames that have arrived: sequence number, type, flags, body."""

    def take(self, sequence, frame_type, flags, body):
        assert not body.readonly
        self.append((sequence, frame_type, flags, bytes(body)))


def frames_on(sock: Any, received, buffer_bytes=1 << 12):
    return Frames(sock, received.take, memoryview(bytearray(buffer_bytes)))


FRAME = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
    st.integers(0, 255),
    st.lists(st.binary(max_size=30), max_size=4),
)


@given(
    st.lists(st.tuples(FRAME, st.booleans()), max_size=8),
    st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    st.sampled_from([1, 13, 14, 64]),
)
def test_any_frames_arrive_by_any_pieces(frames, sizes, buffer_bytes):
    received = Received()
    both = frames_on(Narrow(sizes), received, buffer_bytes)
    for (sequence, frame_type, flags, parts), keep in frames:
        both.send(frame_type, flags, sequence, parts, keep=keep)
    for _ in range(10_000):
        both.send_on()
        both.read()
        if len(received) == len(frames) and not both.unsent:
            break

    assert received == [(*head, b"".join(parts)) for (*head, parts), _ in frames]


@pytest.mark.parametrize(("keep", "arrives"), [(False, b"1" * 8), (True, b"2" * 8)])
def test_parts_are_copied_unless_they_are_to_be_kept(keep, arrives):
    received = Received()
    sock = Narrow([0, 100])  # takes nothing at first
    both, part = frames_on(sock, received), bytearray(b"1" * 8)

    both.send(7, 0, 0, [part], keep=keep)
    assert both.unsent
    part[:] = b"2" * 8
    both.send_on()

    while not received:
        both.read()
    assert received == [(0, 7, 0, arrives)]
    assert not both.unsent
    part.append(0)  # no longer referenced


@pytest.mark.parametrize("keep", [False, True])
def test_more_parts_than_one_system_call_takes(keep):
    """``sendmsg`` takes 1,024 buffers on Linux: with one more the frame was lost."""
    received, numbers = Received(), (1022, 1023, 1024, 1025, 5000)
    for sizes in ([1 << 20], [0, 7, 5000]):
        received.clear()
        both = frames_on(Narrow(sizes), received)
        for number in numbers:
            both.send(7, 0, 0, [b"x"] * number, keep=keep)
        while len(received) < len(numbers):
            both.send_on()
            both.read()
        assert [len(body) for *_, body in received] == [*numbers]


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_the_end_of_a_socket_comes_after_all_frames(how):
    received = Received()
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with ours:
        ours.setblocking(False)
        both = frames_on(ours, received)
        theirs.sendall(frame(7, b"last words") + frame(7, b"cut off")[:-1])
        while not received:
            both.read()
        if how == "reset":
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        while not both.has_ended:
            both.read()
        for _ in range(2):  # no errors
            both.send(7, 0, 0, [bytes(1 << 20)])
            both.send_on()

    assert received == [(0, 7, 0, b"last words")]
