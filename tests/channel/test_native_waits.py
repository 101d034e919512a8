"""Stalls of a transfer that waits in native code."""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch

from procpipe.channel.link import INLINE_BYTES, LinkReceiver, LinkSender
from procpipe.channel.mesh import Mesh, Onlooker
from procpipe.channel.meta import allocate
from procpipe.tree import Flat


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


class Listener(Onlooker):
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


def test_a_rank_that_stops_in_the_middle_of_a_transfer_is_reported():
    """A rank may stop after it has sent its token and before all of a large tensor.

    The receiver is then in gloo's ``Work.wait``, which does not report how long it takes.
    """
    a, b = socket.socketpair()
    for sock in (a, b):
        sock.setblocking(False)
    listener, cpu = Listener(), torch.device("cpu")
    ends = Mesh(0, {1: a}, timeout_s=20.0, stall_timeout_s=0.1, onlooker=Onlooker())
    ours = Mesh(1, {0: b}, timeout_s=20.0, stall_timeout_s=0.1, onlooker=listener)
    transport: Any = Standing(listener.told)
    receiver = LinkReceiver(ours, 0, 1, transport, "activation from stage 0 (rank 0)")
    LinkSender(ends, 1, 1, transport, cpu).send(Flat.of([torch.ones(INLINE_BYTES)]))
    receiver.expect()
    receiver.take()

    what = "activation from stage 0 (rank 0)"
    assert listener.heard == [f"waits for {what}", f"has waited too long for {what}", "goes on"]
    for mesh_ in (ends, ours):
        mesh_.close()
    assert not any(thread.name == "procpipe lookout" for thread in threading.enumerate())
