"""Measures the channels between neighbouring stages; ``procpipe doctor`` starts it on every rank.

    torchrun --nproc_per_node=4 -m procpipe.launch.doctor.probe --output FILE

It uses the sockets, transports and channels of a pipeline, for one pair of neighbours after the
other while all others wait. A round is

    leader                        follower
    1 or 4 messages ───────────>  takes them
    <──────────── the answer ───  as large as a message (latency), or 8 bytes (bandwidth)

The latency is half the median round. Each rank writes what it measured, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Mapping, Sequence
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

_SMALL_BYTES, _MIDDLE_BYTES, _LARGE_BYTES = 8, 64 << 10, 16 << 20

#: Large messages are under way together, so that their latency does not count.
_BURST = 4
_BURST_BYTES = _BURST * _LARGE_BYTES

#: A measurement ends after this many rounds, or after the first one that ends later than this.
_MAX_ROUNDS = 200
_BUDGET_S = 0.25
_MIN_ROUNDS = 3

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

    def lead(self, num_bytes: int, num_messages: int) -> float:
        """Lead rounds; return their median seconds."""
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        rounds_s: list[float] = []
        deadline_s = time.monotonic() + _BUDGET_S
        is_last = False
        while not is_last:
            is_last = len(rounds_s) == _MAX_ROUNDS or (
                len(rounds_s) >= _MIN_ROUNDS and time.monotonic() > deadline_s
            )
            self._receiver.expect()
            start_s = time.perf_counter()
            for _ in range(num_messages):
                self._sender.send(Flat.of((is_last, tensor)))
            self._take()
            rounds_s.append(time.perf_counter() - start_s)
        self._sender.settle()
        return statistics.median(rounds_s[1:])  # the first one warms up

    def follow(self, num_messages: int, *, echo: bool) -> None:
        """Answer the neighbour's rounds."""
        short = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=self._device)
        is_last = False
        while not is_last:
            for _ in range(num_messages):
                self._receiver.expect()
            for _ in range(num_messages):
                is_last, tensor = self._take()
            self._sender.send(Flat.of((is_last, tensor if echo else short)))
        self._sender.settle()

    def _take(self) -> tuple[bool, torch.Tensor]:
        is_last, tensor = self._receiver.take().value
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # until then it is only under way
        return is_last, tensor


def measure(
    world: World, lines: Mapping[int, Line], coordinator: Coordinator
) -> list[dict[str, float]]:
    """Measure with both neighbours; every rank calls it, and it waits for all of them.

    Returns:
        For each pair of this rank, its lower rank and what this rank measured: the one-way
        latencies of 8 bytes and 64 KiB in seconds and the bytes a second of 16 MiB messages down
        to the next rank; or those back up.
    """
    found: list[dict[str, float]] = []
    for lower in range(world.num_ranks - 1):
        if world.rank == lower:
            line = lines[lower + 1]
            found.append(
                {
                    "lower": lower,
                    "small_latency_s": line.lead(_SMALL_BYTES, 1) / 2,
                    "middle_latency_s": line.lead(_MIDDLE_BYTES, 1) / 2,
                    "down_bytes_per_s": _BURST_BYTES / line.lead(_LARGE_BYTES, _BURST),
                }
            )
            line.follow(_BURST, echo=False)
        elif world.rank == lower + 1:
            line = lines[lower]
            line.follow(1, echo=True)
            line.follow(1, echo=True)
            line.follow(_BURST, echo=False)
            up_bytes_per_s = _BURST_BYTES / line.lead(_LARGE_BYTES, _BURST)
            found.append({"lower": lower, "up_bytes_per_s": up_bytes_per_s})
        coordinator.agree(None, lambda _: None)
    return found


def probe(world: World) -> dict[str, Any]:
    """Connect and measure; return this rank's device and pairs. Every rank calls it."""
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
    found = {"device": str(world.device), "pairs": measure(world, lines, coordinator)}
    world.transports.drain()
    coordinator.agree(None, lambda _: None)  # a rank that closes early would cut a last transfer
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write what this rank found."""
    parser = argparse.ArgumentParser(prog="procpipe.launch.doctor.probe")
    parser.add_argument("--output", required=True)
    options = parser.parse_args(argv)
    world = World.from_environment(timeout_s=_TIMEOUT_S)
    try:
        Path(f"{options.output}.{world.rank}").write_text(json.dumps(probe(world)))
    except BaseException as error:
        if not isinstance(error, RemoteStageError):
            world.give_up("".join(traceback.format_exception(error)), error)
        raise
    finally:
        world.close()


if __name__ == "__main__":
    main()
