"""Faults that surprised us, each with its story: what was seen, why, and where.

Found while 0.1.0 was in development. What is tested elsewhere in full has its shortest form here.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed

from procpipe.channel import handshake
from procpipe.channel.handshake import Joiner, accept_peers, connect_to
from procpipe.channel.link import INLINE_BYTES, Receiver, Sender
from procpipe.channel.mesh import Mesh
from procpipe.channel.meta import allocate
from procpipe.channel.native_waits import WaitReports
from procpipe.channel.sockets import listen
from procpipe.errors import PeerLostError, RemoteStageError
from procpipe.job import endings
from procpipe.job.board import Board
from procpipe.tree import Flat


@pytest.fixture
def chain():
    """Ranks 0, 1 and 2, of which 0 and 2 are not connected."""
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    for sock in (a, b, c, d):
        sock.setblocking(False)
    meshes = [mesh(0, {1: a}), mesh(1, {0: b, 2: c}), mesh(2, {1: d})]
    yield meshes
    for one in meshes:
        one.close()


def mesh(rank, sockets):
    return Mesh(
        rank,
        sockets,
        timeout_s=1.0,
        stall_timeout_s=1.0,
        reports=WaitReports(),
    )


def link(meshes):
    cpu = torch.device("cpu")
    return Sender(meshes[0], 1, 1, None, cpu), Receiver(meshes[1], 0, 1, None, "x")


def test_a_true_arrived_as_the_one_before_it(chain):
    """A layer passed on ``1`` and, with the next micro-batch, ``True``: the next stage got ``1``.

    Metadata travels when it differs from the last, and to Python ``("v", 1) == ("v", True)``; so
    are 0.0 and -0.0 equal.
    """
    sender, receiver = link(chain)
    values = [1, True, 1.0, 0.0, -0.0]
    for value in values:
        sender.send(Flat.of([torch.ones(1), value]))
        receiver.expect()

    assert [repr(receiver.take().value[1]) for _ in values] == list(map(repr, values))


def test_a_message_of_many_tensors_vanished(chain):
    """With 1,500 small tensors in one message the next stage waited until the timeout.

    Linux takes 1,024 buffers in one ``sendmsg``; its EMSGSIZE was taken for a peer that had gone,
    which the end of the stream would tell of.
    """
    sender, receiver = link(chain)
    sender.send(Flat.of([torch.ones(1)] * 1500))
    receiver.expect()

    assert len(receiver.take().tensors) == 1500


def test_a_rank_was_blamed_for_noticing(chain):
    """Rank 0 left its loop early; rank 2 was told that rank 1 had.

    Rank 1 noticed first, failed of it, and said goodbye like one that leaves: it trusted that its
    peers hear of a lost rank by themselves, as they do when it is killed.
    """
    a, b, c = chain
    a.close()
    with pytest.raises(PeerLostError):
        b.wait_for(0, lambda: False, lambda: "an activation")
    b.close()

    with pytest.raises(PeerLostError) as caught:
        c.wait_for(1, lambda: False, lambda: "an activation")
    assert caught.value.rank == 0


def test_a_list_of_differences_was_overtaken_by_its_own_failure(chain):
    """Ranks with different settings: rank 0 listed all differences, another rank said only
    "rank 0 failed", now and then.

    The list and the failure that it led to on rank 0 were read at once, and a wait raised the
    failure before it looked at what else had come.
    """
    a, b, _ = chain
    heard = []
    b.on(0, 7, lambda sequence, flags, body: heard.append(bytes(body)))
    a.send(1, 7, 0, 0, b"all differences")
    a.send_failure(0, "DisagreementError")

    b.wait(lambda: heard, lambda: "the outcome")

    assert heard == [b"all differences"]
    with pytest.raises(RemoteStageError):
        b.poll()


def test_strangers_that_said_nothing_held_up_the_start():
    """Each connection that a stranger left open without a word held up a rank's start for 5 s.

    Those who had connected were heard one after the other, each until its time was over.
    """
    listeners, address = listen(None)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    for stranger in strangers:
        stranger.connect(f"\0{address.unix}")
    deadline_s = time.monotonic() + 20.0
    us, them = (Joiner(rank, b"k" * 32, deadline_s, lambda: None) for rank in (0, 1))
    with ThreadPoolExecutor(1) as pool:
        start_s = time.monotonic()
        link = pool.submit(connect_to, 0, address, them)
        peers = accept_peers(listeners, {1}, us)

        assert time.monotonic() - start_s < handshake._HANDSHAKE_TIMEOUT_S
        for sock in (link.result(), *peers.values(), *listeners, *strangers):
            sock.close()


def test_a_process_outlived_a_launcher_that_died_while_it_started(monkeypatch):
    """Torchrun's agent was killed while its workers imported torch: they then waited for its store.

    The kernel tells of the death of a parent only to who has asked before; the store, which is
    there before any worker, tells those who ask too late.
    """
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(
        ConnectionRefusedError, match=f"rank 1 finds no launcher at 127.0.0.1:{port}"
    ):
        endings._check_launcher()


def test_nobody_told_why_a_rank_had_ended(chain):
    """A layer called ``sys.exit``, or a user caught the exception: no rank said what it was.

    Python prints nothing for a ``SystemExit``, and the other ranks left the story to its origin.
    """
    a, b, _ = chain
    a.send_failure(0, "stage 0 (rank 0), in step(): SystemExit: 3\nTraceback …")
    with pytest.raises(RemoteStageError) as caught:
        b.wait(lambda: False, lambda: "an activation")

    line = endings.line_of(1, caught.value, Board.create(1, 2).read())
    assert line == "procpipe: rank 1 ends, because rank 0 failed in step(): SystemExit: 3"


class Standing:
    """A transport whose transfers stand still until the stall is told."""

    needs_acknowledgement = False
    blocks = True
    copies_at_once = False
    max_posted = 1
    inline_bytes = 0

    def __init__(self, told):
        self.told = told

    def post_send(self, tensors, peer, kind):
        return self, b""

    def post_receive(self, meta, peer, kind, note):
        return allocate(meta, "cpu"), self

    def wait(self):
        assert self.told.wait(20.0), "nobody has told of the stall"

    def is_done(self):
        return False


class Listener(WaitReports):
    """Notes what it is told."""

    def __init__(self):
        self.heard = []
        self.told = threading.Event()

    def start_wait(self, what, since_s):
        self.heard.append(f"waits for {what}")

    def end_wait(self):
        self.heard.append("goes on")

    def stalled(self, what, waited_s):
        assert waited_s >= 0.1
        self.heard.append(f"has waited too long for {what}")
        self.told.set()


def test_a_rank_that_stopped_in_the_middle_of_a_transfer_was_waited_for_in_silence():
    """A rank was stopped after its token had gone and before all of a large tensor had.

    The receiver was in gloo's ``Work.wait``, out of which nobody looks at the clock.
    """
    a, b = socket.socketpair()
    for sock in (a, b):
        sock.setblocking(False)
    listener, cpu = Listener(), torch.device("cpu")
    ends = Mesh(0, {1: a}, timeout_s=20.0, stall_timeout_s=0.1, reports=WaitReports())
    ours = Mesh(1, {0: b}, timeout_s=20.0, stall_timeout_s=0.1, reports=listener)
    transport: Any = Standing(listener.told)
    receiver = Receiver(ours, 0, 1, transport, "activation from stage 0 (rank 0)")
    Sender(ends, 1, 1, transport, cpu).send(Flat.of([torch.ones(INLINE_BYTES)]))
    receiver.expect()
    receiver.take()

    what = "activation from stage 0 (rank 0)"
    assert listener.heard == [f"waits for {what}", f"has waited too long for {what}", "goes on"]
    for mesh_ in (ends, ours):
        mesh_.close()
    assert not any(thread.name == "procpipe native waits" for thread in threading.enumerate())
