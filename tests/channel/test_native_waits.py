"""Stalls of a transfer that waits in native code."""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch

from procpipe.channel.link import INLINE_BYTES, Receiver, Sender
from procpipe.channel.mesh import Mesh
from procpipe.channel.meta import allocate
from procpipe.channel.native_waits import WaitReports
from procpipe.tree import Flat


class Stalled:
    """A transport whose transfers stall until the stall is reported."""

    needs_acknowledgement = False
    blocks = True
    holds_device = False
    copies_at_once = False
    max_posted = 1
    inline_bytes = 0

    def __init__(self, is_reported):
        self.is_reported = is_reported

    def post_send(self, tensors, peer, kind):
        return self, b""

    def post_receive(self, meta, peer, kind, note):
        return allocate(meta, "cpu"), self.wait

    def wait(self):
        assert self.is_reported.wait(20.0), "the stall is not reported"

    def is_done(self):
        return False


class Recorder(WaitReports):
    """Records all reports."""

    def __init__(self):
        self.lines = []
        self.is_reported = threading.Event()

    def start_wait(self, what, since_s):
        self.lines.append(f"waits for {what}")

    def end_wait(self):
        self.lines.append("continues")

    def stalled(self, what, waited_s):
        assert waited_s >= 0.1
        self.lines.append(f"has waited too long for {what}")
        self.is_reported.set()


def test_a_rank_that_stops_in_the_middle_of_a_transfer_is_reported():
    """A rank may stop after it has sent its token and before all of a large tensor.

    The receiver is then in gloo's ``Work.wait``, which reports no stalls.
    """
    a, b = socket.socketpair()
    for sock in (a, b):
        sock.setblocking(False)
    reports, cpu = Recorder(), torch.device("cpu")
    senders = Mesh(0, {1: a}, timeout_s=20.0, stall_timeout_s=0.1, reports=WaitReports())
    receivers = Mesh(1, {0: b}, timeout_s=20.0, stall_timeout_s=0.1, reports=reports)
    transport: Any = Stalled(reports.is_reported)
    receiver = Receiver(receivers, 0, 1, transport, "activation from stage 0 (rank 0)")
    Sender(senders, 1, 1, transport, cpu).send(Flat.of([torch.ones(INLINE_BYTES)]))
    receiver.expect()
    receiver.take()

    what = "activation from stage 0 (rank 0)"
    lines = list(dict.fromkeys(reports.lines))  # a stall that lasts is reported again
    assert lines == [f"waits for {what}", f"has waited too long for {what}", "continues"]
    for mesh in (senders, receivers):
        mesh.close()
    assert not any(thread.name == "procpipe native waits" for thread in threading.enumerate())
