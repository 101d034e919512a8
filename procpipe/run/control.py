"""Small messages between ranks, plain JSON, on a channel of the mesh of their own.

Messages of one peer arrive in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from procpipe.channel.mesh import Mesh
from procpipe.run.messages import decode, encode

#: ``agree(ours, combine)``: every rank's value to the first, and what it makes of them to all.
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]

#: The mesh's number of this channel; those of the plan count from 1.
CONTROL = 0


class Control:
    """One rank's connection to every other rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._heard: dict[int, deque[bytes]] = {}
        for peer in mesh.peers:
            self._heard[peer] = deque()
            mesh.on(peer, CONTROL, partial(self._keep, peer))

    def send(self, peer: int, message: bytes) -> None:
        """Send a message to another rank; never blocks."""
        self._mesh.send(peer, CONTROL, 0, 0, message)

    def receive(self, peer: int, what: str) -> bytes:
        """Wait for the next message of a peer; ``what`` names it in errors."""
        heard = self._heard[peer]
        self._mesh.wait(lambda: heard, lambda: f"{what} from {self._mesh.name_of(peer)}", peer=peer)
        return heard.popleft()

    def agree(
        self, ours: Any, combine: Callable[[list[Any]], Any], ranks: Sequence[int] | None = None
    ) -> Any:
        """Bring every rank's value to the first, combine them there, and return the result to all.

        Every one of the ranks calls it, and it waits for all of them.

        Args:
            ours: this rank's value; plain JSON.
            combine: makes plain JSON of the list of all values, by rank; runs on the first only.
            ranks: those that take part, this one among them; by default all.
        """
        first, *others = range(len(self._heard) + 1) if ranks is None else ranks
        if self._mesh.rank != first:
            self.send(first, encode(ours))
            return decode(self.receive(first, "the outcome of a common call"))
        values = [ours]
        values += [decode(self.receive(peer, "its part in a common call")) for peer in others]
        outcome = encode(combine(values))
        for peer in others:
            self.send(peer, outcome)
        return decode(outcome)

    def _keep(self, peer: int, sequence: int, flags: int, body: memoryview) -> None:
        self._heard[peer].append(bytes(body))
