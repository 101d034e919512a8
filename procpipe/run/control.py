"""Small messages between rank 0 and every other rank, on a channel of the mesh of their own.

Messages of one peer arrive in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from procpipe.channel.mesh import Mesh
from procpipe.run.messages import decode, encode

#: ``agree(ours, combine)``: every rank's value to rank 0, and what it makes of them to every rank.
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]

#: The mesh's number of this channel; those of the plan count from 1.
CONTROL = 0


class Control:
    """Rank 0's connection to every other rank, or another rank's to rank 0."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._heard: dict[int, deque[bytes]] = {}
        for peer in mesh.peers if mesh.rank == 0 else (0,):
            self._heard[peer] = deque()
            mesh.on(peer, CONTROL, partial(self._keep, peer))

    def send_to_all(self, message: bytes) -> None:
        """Send a message from rank 0 to every other rank; never blocks."""
        for peer in self._heard:
            self.send(peer, message)

    def send(self, peer: int, message: bytes) -> None:
        """Send a message from rank 0 to another rank, or to rank 0; never blocks."""
        self._mesh.send(peer, CONTROL, 0, 0, message)

    def receive(self, peer: int, what: str) -> bytes:
        """Wait for the next message of a peer; ``what`` names it in errors."""
        heard = self._heard[peer]
        self._mesh.wait(lambda: heard, lambda: f"{what} from {self._mesh.name_of(peer)}", peer=peer)
        return heard.popleft()

    def agree(self, ours: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring every rank's value to rank 0, combine them there, and return the result to all.

        Every rank calls it, and it waits for all of them.

        Args:
            ours: this rank's value; plain JSON.
            combine: makes plain JSON of the list of all values, by rank; runs on rank 0 only.
        """
        if self._mesh.rank != 0:
            self.send(0, encode(ours))
            return decode(self.receive(0, "the outcome of a common call"))
        values = [ours]
        values += [decode(self.receive(peer, "its part in a common call")) for peer in self._heard]
        outcome = encode(combine(values))
        self.send_to_all(outcome)
        return decode(outcome)

    def _keep(self, peer: int, sequence: int, flags: int, body: memoryview) -> None:
        self._heard[peer].append(bytes(body))
