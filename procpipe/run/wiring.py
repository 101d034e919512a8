"""Connects one rank to the others: sockets, what must agree, and a channel for each route.

    1  two sockets to each rank                            World.connect, in Stage()
    2  the same model and settings?                        Coordinator.agree
    3  which transports carry large tensors                World.offer, choose
    4  a channel for each route of the plan, and one between any two ranks beside the plan

Every rank does the same in this order; 2 to 4 in the first call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from procpipe.channel.link import Receiver, Sender, send_on
from procpipe.channel.mesh import Mesh
from procpipe.data.minibatch import on_device
from procpipe.errors import BalanceError, DisagreementError
from procpipe.job.grid import Grid
from procpipe.job.transports import TransportChoice, choose
from procpipe.job.world import World
from procpipe.plan.routes import TARGET, TIED_GRADIENT, Channel, Routes
from procpipe.run.coordinator import Coordinator
from procpipe.run.facts import compare_facts
from procpipe.tree import Flat, map_tensors

#: Values that a user's call moves beside the plan (``fetch``, the targets of ``batches``).
VALUE = "value"

#: The mesh's number of the channel beside the plan; 0 is the control plane, and the channels of the
#: plan from one rank to another are numbered from 1.
_VALUE_NUMBER = 63


@dataclass
class Channels:
    """The ends of channels on this stage."""

    senders: dict[Channel, Sender] = field(default_factory=dict)
    receivers: dict[Channel, Receiver] = field(default_factory=dict)
    poll: Callable[[], None] = lambda: None
    #: Waits until nothing that was sent holds this rank's device; reads nothing if that is so.
    wait_posted: Callable[[], None] = lambda: None


@dataclass
class Wires:
    """One rank's connections."""

    device: torch.device  # this stage's
    mesh: Mesh  # the sockets
    channels: Channels  # of the plan, and around it
    target: Channel  # of the target of a mini-batch
    #: By each other stage with the same parameters: the channels of gradients to it and from it.
    tied: dict[int, tuple[Channel, Channel]]
    choice: TransportChoice  # which transport is between which ranks
    values_to: dict[int, Sender]  # channels beside the plan, by destination
    values_from: dict[int, Receiver]  # the same by source

    def send_target(self, target: Any) -> None:
        """Send a mini-batch's target to the last partition's stage, from this stage's device."""
        self.channels.senders[self.target].send(Flat.of(on_device(target, self.device)))

    def take_target(self) -> Any:
        """Wait for a mini-batch's target, and return it on this stage's device."""
        receiver = self.channels.receivers[self.target]
        receiver.expect()
        return receiver.take().value

    def send_value(self, destination: int, value: Any) -> None:
        """Send a nested value of tensors to a rank, beside the plan.

        Waits, if it is large, until the rank has read most of it, so that it may change then.
        """
        on_cpu = map_tensors(lambda tensor: tensor.detach().cpu(), value)
        sender = self.values_to[destination]
        sender.send(Flat.of(on_cpu))
        sender.wait_reusable()

    def take_value(self, source: int) -> Any:
        """Wait for a value that another rank sends, and return it on this stage's device."""
        receiver = self.values_from[source]
        receiver.expect()
        return on_device(receiver.take().value, self.device)

    def close(self) -> None:
        """Close all channels, without waiting."""
        self.channels.senders.clear()
        self.channels.receivers.clear()
        self.values_to.clear()
        self.values_from.clear()


def connect(
    world: World,
    coordinator: Coordinator,
    routes: Routes,
    ties: Sequence[tuple[int, ...]],
    facts: dict[str, Any],
) -> Wires:
    """Open this rank's channels to all others; every rank calls it, and it waits for all of them.

    Args:
        world: this rank's place in the job.
        coordinator: its messages to the others.
        routes: where tensors go.
        ties: sets of stages, each of which uses a parameter in common.
        facts: what must be the same on every rank, by name; plain JSON.

    Raises:
        DisagreementError: facts differ between ranks; raised on every rank.
        RemoteStageError: another rank failed.
    """
    mesh, grid = world.mesh, world.grid
    differences = coordinator.agree(facts, lambda of_all: compare_facts(of_all, grid.numbers))
    if differences:
        raise DisagreementError(differences)
    choice = coordinator.agree(world.offer(), choose)
    first = [routes.placement.index(stage) for stage in range(routes.num_stages)]
    pairs = sorted({(a, b) for tie in ties for a in tie for b in tie if a != b})
    tied = {pair: (TIED_GRADIENT, first[pair[0]], first[pair[1]]) for pair in pairs}
    target = (TARGET, 0, len(routes.placement) - 1)
    is_sent = routes.placement[0] != routes.placement[-1]
    all_channels = [*routes.channels(), *[target] * is_sent, *tied.values()]
    return Wires(
        world.device,
        mesh,
        _open_channels(world, grid, all_channels, routes.placement, choice),
        target,
        {b: (tied[a, b], tied[b, a]) for a, b in pairs if a == grid.stage},
        choice,
        {peer: Sender(mesh, peer, _VALUE_NUMBER, None) for peer in mesh.peers},
        {
            peer: Receiver(mesh, peer, _VALUE_NUMBER, None, f"{VALUE} from {grid.name_of(peer)}")
            for peer in mesh.peers
        },
    )


def _open_channels(
    world: World,
    grid: Grid,
    all_channels: Sequence[Channel],
    placement: Sequence[int],
    choice: TransportChoice,
) -> Channels:
    """Open this rank's ends of every channel."""
    mesh = world.mesh
    of_replicas = [
        _numbered(all_channels, placement, grid, replica) for replica in range(grid.num_replicas)
    ]
    numbers = of_replicas[grid.replica]
    transports = world.transports.open(choice, chain(*map(dict.values, of_replicas)))
    channels = Channels()
    if not transports:
        return channels
    for channel, (source, destination, number) in numbers.items():
        payload = channel[0]
        if source == mesh.rank:
            transport = transports[destination]
            what = f"{payload} to {grid.name_of(destination)}"
            channels.senders[channel] = Sender(mesh, destination, number, transport, what)
        if destination == mesh.rank:
            what = f"{payload} from {grid.name_of(source)}"
            channels.receivers[channel] = Receiver(mesh, source, number, transports[source], what)

    across = [peer for peer, transport in transports.items() if transport is None]
    holding = [sender for sender in channels.senders.values() if sender.holds_device]

    def wait_posted() -> None:
        for sender in holding:
            sender.wait_posted()

    def poll() -> None:
        """Read what has come, send on what waits, and release what has arrived elsewhere.

        A device has nothing queued then that waits for a host, as this one may wait for its device
        in the next task: to load a kernel, for instance.
        """
        mesh.poll()
        for peer in across:
            send_on(mesh, peer)
        for sender in channels.senders.values():
            if sender.in_flight:
                sender.reap()
        if holding:
            wait_posted()

    channels.poll, channels.wait_posted = poll, wait_posted
    return channels


def _numbered(
    all_channels: Sequence[Channel], placement: Sequence[int], grid: Grid, replica: int
) -> dict[Channel, tuple[int, int, int]]:
    """Return source rank, destination rank and number of each channel, alike on every rank."""
    numbers: dict[Channel, tuple[int, int, int]] = {}
    used: Counter[tuple[int, int]] = Counter()
    for channel in all_channels:
        _, a, b = channel
        source = grid.rank_of(placement[a], replica)
        destination = grid.rank_of(placement[b], replica)
        used[source, destination] += 1
        numbers[channel] = source, destination, used[source, destination]
    if used and max(used.values()) >= _VALUE_NUMBER:
        (source, destination), most = used.most_common(1)[0]
        raise BalanceError(
            f"between ranks {source} and {destination} there would be {most} channels, for skips "
            f"between many partitions, but there can be {_VALUE_NUMBER - 1}: use fewer partitions"
        )
    return numbers
