"""Connected meshes over socket pairs in one process, and the frames they receive."""

from __future__ import annotations

import struct

from procpipe.channel.mesh import Mesh
from procpipe.channel.native_waits import WaitReports

HEADER = struct.Struct("<QIBB")


def make_mesh(rank, sockets, timeout_s=30.0, stall_timeout_s=30.0, reports=None):
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
