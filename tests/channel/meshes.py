"""Meshes of one process, connected by socket pairs; and peers that a test plays."""

from __future__ import annotations

import itertools
import select
import socket
import struct

from procpipe.channel.mesh import Mesh
from procpipe.channel.monitor import Monitor, Reports

HEADER = struct.Struct("<QIBB")

#: No test takes so long.
DEADLINE_S = 20.0


def make_mesh(rank, reports=None, *, timeout_s=DEADLINE_S, stall_timeout_s=DEADLINE_S):
    return Mesh(
        Monitor(
            rank,
            Reports() if reports is None else reports,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
    )


def make_meshes(num_ranks, **options):
    """Return meshes that are all connected to one another."""
    meshes = [make_mesh(rank, **options) for rank in range(num_ranks)]
    for a, b in itertools.combinations(meshes, 2):
        join(a, b)
    return meshes


def join(a, b):
    data, alarms = pair(), pair()
    a.add(b.rank, data[0], alarms[0], None)
    b.add(a.rank, data[1], alarms[1], None)


def pair():
    """Return two connected sockets that do not block."""
    both = socket.socketpair()
    for each in both:
        each.setblocking(False)
    return both


class Peer:
    """A peer of a mesh that the test plays: its ends of both sockets."""

    def __init__(self, mesh, rank, process=None):
        self.data, data = socket.socketpair()
        self.alarm, alarm = socket.socketpair()
        for each in (data, alarm):
            each.setblocking(False)
        mesh.add(rank, data, alarm, process)

    def end(self):
        """End as a killed process does."""
        self.data.close()
        self.alarm.close()


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


def is_readable(descriptor, within_s=DEADLINE_S):
    """Wait until a descriptor is readable; return whether it is."""
    return bool(select.select([descriptor], [], [], within_s)[0])


class Recorded(Reports):
    """Records all reports.

    Attributes:
        notes: what was reported, in order.
        busy: the peers with which this rank's device seems to be busy.
    """

    def __init__(self):
        self.notes = []
        self.busy = []

    def note_wait(self, what, since_s):
        self.notes.append(f"waits for {what}" if what else "waits no more")

    def stalled(self, what, waited_s):
        self.notes.append(f"has waited {waited_s:g} s for {what}")

    def last_seen(self, peer):
        return f"rank {peer} was seen in F3"

    def busy_with(self):
        return self.busy

    def end_process(self, error):
        self.notes.append(f"ends: {type(error).__name__}: {error}")
