"""Connected meshes for each test."""

from __future__ import annotations

import pytest

from tests.channel.meshes import Peer, make_mesh, make_meshes


@pytest.fixture
def net():
    """Return a function that makes connected meshes, which are closed at the end."""
    made = []

    def make(num_ranks, **options):
        meshes = make_meshes(num_ranks, **options)
        made.extend(meshes)
        return meshes

    yield make
    for each in made:
        each.close()


@pytest.fixture
def wired():
    """The mesh of rank 1, and its peer, rank 0, which the test plays."""
    mesh = make_mesh(1)
    peer = Peer(mesh, 0)
    yield mesh, peer
    mesh.close()
    peer.end()
