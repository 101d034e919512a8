"""Connected meshes for each test."""

from __future__ import annotations

import socket

import pytest

from tests.channel.meshes import make_mesh


@pytest.fixture
def net():
    """Return a function that makes connected meshes, which are closed at the end."""
    made = []

    def make(num_ranks, **options):
        sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
        for a in range(num_ranks):
            for b in range(a):
                sockets[a][b], sockets[b][a] = socket.socketpair()
        for ours in sockets:
            for sock in ours.values():
                sock.setblocking(False)
        meshes = [make_mesh(rank, sockets[rank], **options) for rank in range(num_ranks)]
        made.extend(meshes)
        return meshes

    yield make
    for each in made:
        each.close()


@pytest.fixture
def wired(net):
    """The mesh of rank 1, whose peer 0 is a plain socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    mesh = make_mesh(1, {0: ours})
    yield mesh, theirs
    mesh.close()
    theirs.close()
