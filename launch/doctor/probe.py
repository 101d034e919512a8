"""Measures the channels between neighbouring stages; ``procpipe doctor`` starts it on every rank.

    procpipe run -n 4 -m procpipe.launch.doctor.probe --output FILE

It uses the sockets, transports and channels of a pipeline, for one pair of neighbours after the
other while all others wait. A round is a message to the follower, and the same back. The latency is
half the median round of a small message; the bandwidth is what half the median round of a large one
gives. Each rank writes what it measured with the next one, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from procpipe.channel.base import Transport
from procpipe.channel.link import Receiver, Sender
from procpipe.channel.mesh import Mesh
from procpipe.errors import RemoteStageError
from procpipe.job.transports import choose
from procpipe.job.world import World
from procpipe.run.coordinator import Coordinator
from procpipe.tree import Flat

#: The ids of a pair's two channels; 0 is the control plane's.
_DOWN, _UP = 1, 2

#: The bytes of a message, and the number of rounds, of which the first one warms up.
_SMALL, _LARGE = (8, 100), (32 << 20, 5)

#: The limit of each wait for a peer.
_TIMEOUT_S = 20.0


class Line:
    """This rank's ends of the two channels to a neighbour."""

    def __init__(
        self, mesh: Mesh, peer: int, transport: Transport | None, device: torch.device
    ) -> None:
        sends, takes = (_DOWN, _UP) if mesh.rank < peer else (_UP, _DOWN)
        self._sender = Sender(mesh, peer, sends, transport, f"a probe to rank {peer}")
        self._receiver = Receiver(mesh, peer, takes, transport, f"a probe from rank {peer}")
        self._device = device

    def lead(self, num_bytes: int, num_rounds: int) -> float:
        """Lead rounds; return half the median one, in seconds."""
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        rounds_s: list[float] = []
        for _ in range(num_rounds):
            self._receiver.expect()
            start_s = time.perf_counter()
            self._sender.send(Flat.of(tensor))
            self._take()
            rounds_s.append(time.perf_counter() - start_s)
        self._sender.settle()
        return statistics.median(rounds_s[1:]) / 2

    def follow(self, num_rounds: int) -> None:
        """Answer the neighbour's rounds."""
        for _ in range(num_rounds):
            self._receiver.expect()
            self._sender.send(Flat.of(self._take()))
        self._sender.settle()

    def _take(self) -> torch.Tensor:
        tensor: torch.Tensor = self._receiver.take().value
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # until then it is only under way
        return tensor


def probe(world: World) -> dict[str, Any]:
    """Connect and measure; every rank calls it.

    Returns:
        This rank's device and, except on the last one, the one-way latency to the next rank in
        seconds and the bandwidth in bytes a second.
    """
    mesh = world.connect()
    coordinator = Coordinator(mesh, world.grid)
    neighbours = [(rank, rank + 1) for rank in range(world.num_ranks - 1)]
    choice = coordinator.agree(world.offer(), choose)
    transports = world.transports.open(
        choice, (end for a, b in neighbours for end in ((a, b, _DOWN), (b, a, _UP)))
    )
    lines = {
        peer: Line(mesh, peer, transport, world.device) for peer, transport in transports.items()
    }
    found: dict[str, Any] = {"device": world.device.type}
    for lower, upper in neighbours:
        if world.rank == lower:
            found["latency_s"] = lines[upper].lead(*_SMALL)
            found["bytes_per_s"] = _LARGE[0] / lines[upper].lead(*_LARGE)
        elif world.rank == upper:
            lines[lower].follow(_SMALL[1])
            lines[lower].follow(_LARGE[1])
        coordinator.agree(None, lambda _: None)
    world.transports.drain()
    coordinator.agree(None, lambda _: None)  # a rank that closes early would cut a last transfer
    return found


def main() -> None:
    """Measure, and write what this rank found."""
    parser = argparse.ArgumentParser(prog="procpipe.launch.doctor.probe")
    parser.add_argument("--output", required=True)
    output = parser.parse_args().output
    world = World.from_environment(timeout_s=_TIMEOUT_S)
    try:
        Path(f"{output}.{world.rank}").write_text(json.dumps(probe(world)))
    except BaseException as error:
        if not isinstance(error, RemoteStageError):
            world.give_up("".join(traceback.format_exception(error)), error)
        raise
    finally:
        world.close()


if __name__ == "__main__":
    main()
