"""A rank's handlers of frames, its waits for them, and what a wait raises."""

from __future__ import annotations

import itertools
import math
import re
import time

import pytest

from procpipe.channel.monitor import FAILURE
from procpipe.errors import PeerLostError, RemoteStageError, WaitTimeoutError
from tests.channel.meshes import Recorded, frame, make_meshes, nothing, received_by


def failed(mesh, error=RemoteStageError, **options):
    """Return the error that a wait raises."""
    with pytest.raises(error) as caught:
        mesh.wait(lambda: False, nothing, **options)
    return caught.value


# -- frames --------------------------------------------------------------------------------------


def test_an_early_frame_is_kept_for_its_handler(net):
    a, b = net(2, timeout_s=math.inf, stall_timeout_s=math.inf)
    order = received_by(b, 0, 1)

    a.send(1, 7, 0, 0, b"early")
    a.send(1, 7, 1, 1, b"too")
    a.send(1, 1, 0, 0)
    b.wait(lambda: order, nothing)
    received = received_by(b, 0, 7)
    a.send(1, 7, 0, 2, b"late")
    b.wait(lambda: len(received) == 3, nothing)

    assert received == [(0, 0, b"early"), (1, 1, b"too"), (2, 0, b"late")]


# -- waits ---------------------------------------------------------------------------------------


def test_a_timeout_error_has_the_rank_the_time_and_the_message():
    recorded = Recorded()
    a, b = make_meshes(2, reports=recorded, timeout_s=0.3, stall_timeout_s=0.1)

    with pytest.raises(WaitTimeoutError) as caught:
        b.wait(lambda: False, lambda: "activation 3 from stage 0 (rank 0)")

    text = str(caught.value)
    assert re.match(r"rank 1 has waited 0\.\d s for activation 3 from stage 0 \(rank 0\)", text)
    assert "larger timeout_s" in text
    b.close()
    a.close()
    what = "activation 3 from stage 0 (rank 0)"
    first, *stalls = recorded.notes
    assert first == f"waits for {what}"
    assert 1 <= len(stalls) <= 2  # after 0.1 and 0.2 s
    assert all(re.fullmatch(rf"has waited \S+ s for {re.escape(what)}", each) for each in stalls)


# -- failures ------------------------------------------------------------------------------------


def test_what_a_peer_sent_comes_before_its_failure(wired):
    mesh, peer = wired
    received = received_by(mesh, 0, 7)
    peer.data.sendall(b"".join(frame(7, bytes([k])) for k in range(3)))
    peer.alarm.sendall(frame(FAILURE, b"the story", 4))

    mesh.wait(lambda: received, nothing)

    assert str(failed(mesh)) == "rank 4 failed:\nthe story"
    assert [body for *_, body in received] == [b"\0", b"\1", b"\2"]
    with pytest.raises(RemoteStageError, match="the story"):
        mesh.poll()
    with pytest.raises(RemoteStageError, match="the story"):
        mesh.wait_failure()


def test_a_failure_overtakes_unsent_frames(net):
    a, b, c = net(3)
    for _ in range(100):
        a.send(1, 7, 0, 0, bytes(1 << 20))

    a.fail(RemoteStageError(0, "the story"))
    a.close()

    for mesh in (b, c):
        error = failed(mesh)
        assert (type(error), error.rank, error.story) == (RemoteStageError, 0, "the story")


# -- goodbyes ------------------------------------------------------------------------------------


def test_a_peer_that_has_left_is_a_fault_if_a_rank_needs_it(net):
    a, b, c = net(3)
    received = received_by(c, 1, 7), received_by(c, 0, 7)
    a.send(2, 7, 0, 0, b"the loss")
    a.leave()
    a.close()
    b.send(2, 7, 0, 0, b"still here")
    c.wait(lambda: all(received), nothing, peer=1)
    answers = itertools.chain([False] * 5, itertools.repeat(True))
    c.wait(lambda: next(answers), nothing, peer=0, every_s=0.001)

    error = failed(c, PeerLostError, peer=0)
    assert error.rank == 0
    assert error.story == (
        "rank 0 has left the pipeline (its script ended, or closed its stage) while rank 2 waits "
        "for nothing: every rank must make the same calls"
    )
    assert str(failed(b)) == str(error)  # and not that rank 2 failed


def test_other_uses_of_a_peer_that_has_left(net):
    for act, what in (
        (lambda mesh: mesh.send(1, 7, 0, 0), "sends to it"),
        (lambda mesh: mesh.wait_failure([1], "adds up"), "adds up"),
    ):
        one, other = net(2)
        other.leave()
        one._read_until(lambda one=one: not one.is_connected(1), 20.0)
        with pytest.raises(PeerLostError, match=f"rank 1 has left .* while rank 0 {what}"):
            act(one)


def test_a_peer_whose_data_socket_alone_ends_is_lost(wired, monkeypatch):
    """As where a firewall drops one of two connections: no failure follows."""
    monkeypatch.setattr("procpipe.channel.mesh._FAILURE_TIMEOUT_S", 0.05)
    mesh, peer = wired
    peer.data.close()

    assert failed(mesh, PeerLostError, peer=0).rank == 0


def test_a_peer_that_reads_nothing_holds_nobody_up(net, monkeypatch):
    monkeypatch.setattr("procpipe.channel.mesh._LAST_FRAME_TIMEOUT_S", 0.05)
    one, _ = net(2)
    for _ in range(20):
        one.send(1, 7, 0, 0, bytes(1 << 20))

    start_s = time.monotonic()

    one.leave()
    one.close()

    assert time.monotonic() - start_s < 4.0  # 5 s where the limit above is not used
