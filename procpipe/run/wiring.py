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
from typing import Any

from procpipe.channel.link import Receiver, Sender, send_on
from procpipe.data.microbatch import on_device
from procpipe.errors import BalanceError, DisagreementError
from procpipe.job.transports import TransportChoice, choose
from procpipe.job.world import World
from procpipe.plan.routes import TARGET, TIED_GRADIENT, Channel, Routes, Transfer
from procpipe.run.coordinator import Coordinator, compare_facts
from procpipe.tree import Flat, map_tensors

#: Values that a user's call moves beside the plan (``fetch``, the targets of ``batches``).
VALUE = "value"

#: The mesh's number of the channel beside the plan; 0 is the control plane, and the channels of the
#: plan from one rank to another are numbered from 1.
_VALUE_NUMBER = 63


class Wires:
    """One rank's connections; building it waits for all ranks, which all do it.

    Args:
        world: this rank's place in the job.
        coordinator: its messages to the others.
        routes: where tensors go.
        ties: sets of stages, each of which uses a parameter in common.
        facts: what must be the same on every rank, by name; plain JSON.

    Attributes:
        mesh: the sockets.
        choice: which transport is between which ranks.
        senders, receivers: this rank's ends of the channels of the plan, and around it.
        tied: by each other stage with the same parameters, the transfers of gradients to it and
            from it.
        poll: called before each task, if there are other ranks: reads what has come, sends on what
            waits, and releases what has arrived elsewhere. A device has nothing queued then that
            waits for a host, as this one may wait for its device in the task: to load a kernel.

    Raises:
        BalanceError: there would be too many channels.
        DisagreementError: facts differ between ranks; raised on every rank.
        RemoteStageError: another rank failed.
    """

    def __init__(
        self,
        world: World,
        coordinator: Coordinator,
        routes: Routes,
        ties: Sequence[tuple[int, ...]],
        facts: dict[str, Any],
    ) -> None:
        mesh, grid, placement = world.mesh, world.grid, routes.placement
        differences = coordinator.agree(facts, lambda of_all: compare_facts(of_all, grid.numbers))
        if differences:
            raise DisagreementError(differences)
        self.mesh = mesh
        self.choice: TransportChoice = coordinator.agree(world.offer(), choose)
        self.senders: dict[Channel, Sender] = {}
        self.receivers: dict[Channel, Receiver] = {}
        self._device = world.device
        first = [placement.index(stage) for stage in range(routes.num_stages)]
        pairs = sorted({(a, b) for tie in ties for a in tie for b in tie if a != b})
        tied = {(a, b): Transfer(TIED_GRADIENT, 0, first[a], first[b]) for a, b in pairs}
        self.tied = {b: (tied[a, b], tied[b, a]) for a, b in pairs if a == grid.stage}
        self._target = TARGET, 0, len(placement) - 1
        is_sent = placement[0] != placement[-1]
        around = [*[self._target] * is_sent, *[transfer.channel for transfer in tied.values()]]
        numbers = _numbered([*routes.channels(), *around], routes)
        transports = world.transports.open(
            self.choice,
            [
                (grid.rank_of(a, replica), grid.rank_of(b, replica), number)
                for replica in range(grid.num_replicas)
                for a, b, number in numbers.values()
            ],
        )
        for channel, (a, b, number) in numbers.items():
            source, destination = grid.rank_of(a), grid.rank_of(b)
            if source == mesh.rank:
                what = f"{channel[0]} to {grid.name_of(destination)}"
                to = transports[destination]
                self.senders[channel] = Sender(mesh, destination, number, to, what)
            if destination == mesh.rank:
                what = f"{channel[0]} from {grid.name_of(source)}"
                self.receivers[channel] = Receiver(mesh, source, number, transports[source], what)
        self._across = [peer for peer, transport in transports.items() if transport is None]
        self._holding = [sender for sender in self.senders.values() if sender.holds_device]
        has_left = world.device.type == "cpu" and not self._across  # what is sent, at once
        poll = mesh.poll if has_left else self._poll
        self.poll: Callable[[], None] | None = poll if transports else None
        self._values_to = {peer: Sender(mesh, peer, _VALUE_NUMBER, None) for peer in mesh.peers}
        self._values_from = {
            peer: Receiver(mesh, peer, _VALUE_NUMBER, None, f"{VALUE} from {grid.name_of(peer)}")
            for peer in mesh.peers
        }

    def wait_posted(self) -> None:
        """Wait until nothing that was sent holds this rank's device; read nothing if that is so."""
        for sender in self._holding:
            sender.wait_posted()

    def _poll(self) -> None:
        self.mesh.poll()
        for peer in self._across:
            send_on(self.mesh, peer)
        for sender in self.senders.values():
            if sender.in_flight:
                sender.reap()
        self.wait_posted()

    def flush(self) -> None:
        """Wait until nothing of this call is left to be done by this rank, or read from its memory.

        Until its next call a rank may do anything: wait for a peer by other means, write into the
        mini-batch it gave, or into parameters that a layer returned.
        """
        self.wait_posted()
        for sender in self.senders.values():
            if sender.in_flight:
                sender.wait_reusable()
        self.mesh.flush()

    def send_target(self, target: Any) -> None:
        """Send a mini-batch's target to the last partition's stage, from this stage's device."""
        self.senders[self._target].send(Flat.of(on_device(target, self._device, "target")))

    def take_target(self) -> Any:
        """Wait for a mini-batch's target, and return it on this stage's device."""
        receiver = self.receivers[self._target]
        receiver.expect()
        return receiver.take().value

    def send_value(self, destination: int, value: Any) -> None:
        """Send a nested value of tensors to a rank, beside the plan.

        Waits, if it is large, until the rank has read most of it, so that it may change then.
        """
        on_cpu = map_tensors(lambda tensor: tensor.detach().cpu(), value)
        sender = self._values_to[destination]
        sender.send(Flat.of(on_cpu))
        sender.wait_reusable()

    def take_value(self, source: int) -> Any:
        """Wait for a value that another rank sends, and return it on this stage's device."""
        receiver = self._values_from[source]
        receiver.expect()
        return on_device(receiver.take().value, self._device)

    def close(self) -> None:
        """Close all channels, without waiting."""
        for ends in (self.senders, self.receivers, self._values_to, self._values_from):
            ends.clear()


def _numbered(channels: Sequence[Channel], routes: Routes) -> dict[Channel, tuple[int, int, int]]:
    """Return of each channel its stages, and its number among those between the same two."""
    numbers: dict[Channel, tuple[int, int, int]] = {}
    used: Counter[tuple[int, int]] = Counter()
    for channel in channels:
        _, a, b = channel
        ends = routes.placement[a], routes.placement[b]
        used[ends] += 1
        numbers[channel] = *ends, used[ends]
        if used[ends] == _VALUE_NUMBER:
            raise BalanceError(
                f"between stages {ends[0]} and {ends[1]} there would be more than "
                f"{_VALUE_NUMBER - 1} channels, for skips between many partitions: use fewer"
            )
    return numbers
