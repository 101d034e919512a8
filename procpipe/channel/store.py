"""Torch's kind of store over the mesh: through it, processes of NCCL and gloo find one another.

A value goes to every rank at once. ``get`` waits on the mesh, and so ends when a rank fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from torch.distributed import Store

from procpipe.channel.mesh import Mesh

#: The frame type of values; no channel's.
_VALUE = 252


class MeshStore(Store):  # type: ignore[misc, unused-ignore]
    """The store of a pipeline; torch calls it from C++, in the main thread."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._values: dict[str, bytes] = {}
        for peer in mesh.peers:
            mesh.on(peer, _VALUE, self._keep)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value on every rank."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        for peer in self._mesh.peers:
            self._mesh.send(peer, _VALUE, 0, len(key.encode()), key.encode(), data)

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it is set."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Iterable[str]) -> bool:
        """Return whether all of these are set."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these are set; the mesh's time limit counts."""
        self._mesh.wait(lambda: self.check(keys), lambda: "the other ranks to connect by torch")

    def has_extended_api(self) -> bool:
        """Return False, so that torch uses only the methods above."""
        return False

    def _keep(self, sequence: int, flags: int, body: memoryview) -> None:
        self._values[str(body[:sequence], "utf-8")] = bytes(body[sequence:])
