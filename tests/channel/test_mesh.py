"""A rank's handlers of frames, and its waits for them."""

from __future__ import annotations

import re
import threading
import time

import pytest

from procpipe.errors import RemoteStageError, WaitTimeoutError
from tests.channel.meshes import Recorded, make_mesh, nothing, received_by


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


def test_a_condition_without_frames_is_polled(net):
    _, b = net(2)
    answers = iter([False, False, False, True])
    start = time.monotonic()

    b.wait(lambda: next(answers), nothing, every_s=0.001)

    assert time.monotonic() - start < 4.0  # 30 s (stall_timeout_s) if it is not polled


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
