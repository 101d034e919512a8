"""A rank's handlers of frames, its waits for them, and what a wait raises."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from typing import Any

import pytest
from torch.distributed import PrefixStore

from procpipe.channel.monitor import FAILURE, GOODBYE
from procpipe.channel.store import MeshStore
from procpipe.errors import PeerLostError, RemoteStageError, StageClosedError, WaitTimeoutError
from tests.channel.meshes import Peer, Recorded, frame, make_mesh, make_meshes, nothing, received_by
from tests.test_forks import in_child


def failed(mesh, error=RemoteStageError, **options):
    """Return the error that a wait raises."""
    with pytest.raises(error) as caught:
        mesh.wait(lambda: False, nothing, **options)
    return caught.value


# -- frames --------------------------------------------------------------------------------------


def test_frames_are_dispatched_by_peer_and_type(net):
    a, b, c = net(3)
    received = [received_by(c, 0, 1), received_by(c, 0, 2), received_by(c, 1, 1)]

    a.send(2, 1, 3, 2**32 - 1, b"ab", bytearray(b"cd"), memoryview(b"ef"))
    a.send(2, 2, 0, 0)
    b.send(2, 1, 0, 0, b"from 1")
    c.wait(lambda: all(received), nothing)

    assert received == [[(2**32 - 1, 3, b"abcdef")], [(0, 0, b"")], [(0, 0, b"from 1")]]
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


def test_two_ranks_that_fill_each_others_sockets(net):
    meshes = net(2)
    received: Any = ([], [])
    for mesh, frames, peer in zip(meshes, received, (1, 0), strict=True):
        mesh.on(
            peer,
            7,
            lambda sequence, flags, body, frames=frames: frames.append((sequence, len(body))),
        )
        for k in range(20):
            mesh.send(peer, 7, 0, k, bytes([k]) * (1 << 20))
        assert mesh.has_unsent(peer)

    def exchange(mesh, frames):
        mesh.wait(lambda: len(frames) == 20, nothing)
        mesh.flush()  # the first to receive everything still has frames to send

    other = threading.Thread(target=exchange, args=(meshes[0], received[0]))
    other.start()
    exchange(meshes[1], received[1])
    other.join()

    assert [*received] == [[(k, 1 << 20) for k in range(20)]] * 2
    assert not any(mesh.has_unsent(peer) for mesh, peer in zip(meshes, (1, 0), strict=True))


# -- waits ---------------------------------------------------------------------------------------


def test_a_wait_reads_only_what_it_needs(wired):
    mesh, peer = wired
    peer.end()

    mesh.wait(lambda: True, nothing)

    answers = iter([False, False, True])
    alone = make_mesh(0)
    alone.wait(lambda: next(answers), nothing, every_s=0.001)  # nothing else wakes it
    alone.flush()
    alone.poll()
    alone.close()
    assert alone.peers == ()


def test_a_wait_without_a_limit():
    a, b = make_meshes(2, timeout_s=math.inf, stall_timeout_s=math.inf)
    received = received_by(a, 1, 7)
    b.send(0, 7, 0, 0)

    a.wait(lambda: received, nothing)

    a.close()
    b.close()


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


@pytest.mark.parametrize("is_known", [True, False])
def test_the_end_of_a_peer_is_a_failure_of_it(net, is_known):
    a, b, c = net(3)
    received = received_by(c, 0, 7)
    a.send(2, 7, 0, 0, b"last words")
    a.close()
    if is_known:
        c.wait(lambda: received, nothing)
        c._read_until(lambda: not c.is_connected(0), 20.0)

    for mesh in (b, c):
        error = failed(mesh, PeerLostError)
        assert error.rank == 0
        assert error.story.startswith("rank 0 ended without a message")
        with pytest.raises(PeerLostError, match="rank 0 ended without a message"):
            mesh.wait_failure()
    assert [body for *_, body in received] == [b"last words"]


# -- goodbyes ------------------------------------------------------------------------------------


def test_a_peer_that_has_left_is_a_fault_if_a_rank_needs_it(net):
    a, b, c = net(3)
    received = received_by(c, 1, 7), received_by(c, 0, 7)
    a.send(2, 7, 0, 0, b"the loss")
    a.leave()
    a.close()
    b.send(2, 7, 0, 0, b"still here")
    c.wait(lambda: all(received), nothing, peer=1)
    answers = iter([False] * 5 + [True])
    c.wait(lambda: next(answers), nothing, peer=0, every_s=0.001, grace_s=10.0)

    error = failed(c, PeerLostError, peer=0, every_s=0.001, grace_s=0.01)
    assert error.rank == 0
    assert error.story == (
        "rank 0 has left the pipeline (its script ended, or closed its stage) while rank 2 waits "
        "for nothing: every rank must make the same calls"
    )
    assert str(failed(b)) == str(error)  # and not that rank 2 failed


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda mesh: mesh.send(1, 7, 0, 0), "sends to it"),
        (lambda mesh: mesh.wait_failure([1], "adds up"), "adds up"),
    ],
)
def test_other_uses_of_a_peer_that_has_left(net, act, what):
    one, other = net(2)
    other.leave()
    one._read_until(lambda: not one.is_connected(1), 20.0)

    with pytest.raises(PeerLostError, match=f"rank 1 has left .* while rank 0 {what}"):
        act(one)


def test_ranks_leave_together(net):
    """They send what is left, and wait for one another; then each may end as it likes."""
    one, other = net(2)
    received = received_by(other, 0, 7)
    for _ in range(20):
        one.send(1, 7, 0, 0, bytes(1 << 20))
    leaving = threading.Thread(target=lambda: (one.leave(20.0), one.close()))
    leaving.start()
    other.leave(20.0)
    other.close()
    leaving.join()

    assert len(received) == 20
    for mesh in (one, other):
        assert mesh.monitor.failure is None
        with pytest.raises(StageClosedError, match="the stage was closed"):
            mesh.check_open()
        mesh.close()


def test_a_peer_that_reads_nothing_holds_nobody_up(net, monkeypatch):
    monkeypatch.setattr("procpipe.channel.mesh._LAST_FRAME_TIMEOUT_S", 0.05)
    one, _ = net(2)
    for _ in range(20):
        one.send(1, 7, 0, 0, bytes(1 << 20))

    start_s = time.monotonic()

    one.leave()
    one.close()

    assert time.monotonic() - start_s < 4.0  # 5 s where the limit above is not used


# -- descriptors ---------------------------------------------------------------------------------


def test_no_descriptor_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for how in ("close", "end", "leave"):
        a, b = make_meshes(2)
        if how == "leave":
            a.leave()
        if how != "close":
            a.close()
            failed(b, PeerLostError, peer=0)
        a.close()
        b.close()

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.dist
def test_a_forked_child_has_no_sockets_and_cannot_send(wired):
    mesh, peer = wired
    mesh.send(0, 3, 0, 0, b"before")

    def act_in_child():
        for act in (
            lambda: mesh.send(0, 3, 0, 0, b"a child"),
            lambda: mesh.wait(lambda: False, nothing),
            mesh.poll,
            mesh.check_open,
        ):
            with pytest.raises(StageClosedError, match=r"was forked from that of rank 1 \("):
                act()
        mesh.fail(RemoteStageError(1, "a story"))
        mesh.leave()
        mesh.close()
        return len(mesh._data)

    assert in_child(act_in_child) == "0"
    mesh.check_open()
    mesh.send(0, 3, 0, 0, b"after")
    mesh.leave()
    assert peer.data.recv(1000) == frame(3, b"before") + frame(3, b"after") + frame(GOODBYE)
    assert peer.alarm.recv(1000) == frame(GOODBYE)


def test_a_peer_may_end_after_it_has_left(wired):
    mesh, peer = wired
    received = received_by(mesh, 2, 7)
    other = Peer(mesh, 2)
    for sock in (peer.data, peer.alarm):
        sock.sendall(frame(GOODBYE))
        sock.close()
    other.data.sendall(frame(7))

    mesh.wait(lambda: received, nothing)

    assert not mesh.is_connected(0)
    assert mesh.monitor.failure is None
    other.end()


def test_torchs_store_over_the_mesh(net):
    stores = [PrefixStore("group", MeshStore(mesh)) for mesh in net(3)]
    stores[0].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 3

    meshes = net(2)
    store = MeshStore(meshes[0])
    meshes[1].close()
    with pytest.raises(PeerLostError):
        store.get("never set")
