"""Each call of all ranks: the first rank of a replica decides it, and replicas compare it.

    first rank of a replica                    its other ranks
    issue: names a plan by its digest; its   ──> follow: check that they are in the same call and
    text goes along the first time               mode

    a stage                                    the same stage of each other replica
    announce: its call, what it counts       ──> meet: in the same call? what all count together
                                             <──

A replica waits for no other before it works: ``meet`` is called before the first thing that is
added up over replicas, on the last stage the loss's gradient. What must be made in common is in
``Order.is_shared``. Between the items of loaders the first ranks compare where they are
(``next_item``). A rank in another call is an error on all ranks, not a hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from procpipe.channel.mesh import Mesh
from procpipe.errors import CallMismatchError
from procpipe.job.grid import Grid
from procpipe.run.order import Order, decode, decode_order, encode
from procpipe.run.programs import Programs

#: ``agree(ours, combine)``: every rank's value to the first, and what it makes of them to all.
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]

#: The mesh's number of the channel of these messages; those of tensors count from 1.
CONTROL = 0


class Coordinator:
    """One rank's side of the calls that ranks make together, and its small messages to them.

    Attributes:
        programs: the plans that orders name; set once the model is cut.
    """

    programs: Programs

    def __init__(self, mesh: Mesh, grid: Grid) -> None:
        self._mesh = mesh
        self._grid = grid
        self._own = grid.same_replica()
        #: The ranks that run this stage in other replicas.
        self._others = [rank for rank in grid.same_stage() if rank != grid.rank]
        self._sent: set[str] = set()  # plans, by their digests
        self._arrived: dict[int, deque[bytes]] = {}
        for peer in mesh.peers:
            self._arrived[peer] = deque()
            mesh.on(peer, CONTROL, partial(self._keep, peer))
        self._announced = Order("")  # the newest call
        self._value: Any = None  # what this replica has announced of it
        self._values: list[Any] | None = []  # of each replica; None until all have come

    # -- within a replica ------------------------------------------------------------------------

    def begin(self, call: str, *, is_training: bool, **decided: Any) -> Order:
        """Begin a call, by its method's name: issue its order on the first rank, else follow it.

        ``decided`` is what the first rank decides, see ``Order``.

        Raises:
            CallMismatchError: the first rank is in another call or mode.
        """
        # A backward pass runs with gradients off on the rank where autograd calls it.
        is_grad_enabled = torch.is_grad_enabled() or call == "backward"
        ours = Order(call, is_training, is_grad_enabled, **decided)
        return self.issue(ours) if self._grid.stage == 0 else self.follow(ours)

    def issue(self, order: Order) -> Order:
        """Send an order to the other ranks of this replica, with a plan; never blocks."""
        if order.sizes:
            plan = self.programs.choose(order)
            order = replace(order, plan=plan.digest)
            if order.plan not in self._sent:
                self._sent.add(order.plan)
                order = replace(order, plan_text=plan.to_text())
        message = encode(order)
        for rank in self._own[1:]:
            self.send(rank, message)  # step 3
        return order

    def follow(self, ours: Order) -> Order:
        """Wait for the first rank's next order and check that it is for the call we are in."""
        message = self.receive(self._own[0], f"the order for {ours.call}()")
        order = decode_order(message)
        self._check(ours.call, ours.mode(), order.call, order.mode(), self._own[0])
        if order.plan_text:
            self.programs.add(order.plan_text)
        return order

    # -- between replicas ------------------------------------------------------------------------

    def announce(self, order: Order, value: Any = None) -> None:
        """Send a call to the same stage of all other replicas, if they make it too; never blocks.

        ``value`` is what :meth:`meet` is to return of this replica; plain JSON.
        """
        self._announced, self._values = order, [value]
        if order.is_shared and self._others:
            self._value, self._values = value, None
            self._tell(self._others, order.call, order.mode(), order.common(), value)

    def meet(self) -> list[Any]:
        """Return what each replica has announced of this call; waits for them, once a call.

        Of a call that each replica makes for itself, only what this one has announced.

        Raises:
            CallMismatchError: a replica is in another call or mode, or has other arguments.
        """
        if self._values is None:
            order = self._announced
            values = self._take(self._others, order.call, order.mode(), order.common())
            values[self._grid.rank] = self._value
            self._values = [values[rank] for rank in sorted(values)]
        return self._values

    def next_item(
        self, mode: str, common: dict[str, Any], ours: Any, gone: Collection[int]
    ) -> dict[int, Any]:
        """Return what the first rank of each replica says before its next item; waits for them.

        Args:
            mode: of the stage.
            common: what all must have in common, by its name; plain JSON.
            ours: what this one says; plain JSON.
            gone: those whose loops have ended, which say nothing.

        Returns:
            What each says, by its rank.

        Raises:
            CallMismatchError: a replica is in another call or mode, or has other arguments.
        """
        peers = [rank for rank in self._others if rank not in gone]
        self._tell(peers, "batches", mode, common, ours)
        return {self._grid.rank: ours} | self._take(peers, "batches", mode, common)

    def agree_in_call(self, ours: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring together the values of all ranks of all replicas, once all are in this call."""
        self.meet()
        return self.agree(ours, combine)

    def _tell(
        self, peers: Sequence[int], call: str, mode: str, common: dict[str, Any], value: Any
    ) -> None:
        message = encode([call, mode, common, value])
        for peer in peers:
            self.send(peer, message)

    def _take(
        self, peers: Sequence[int], call: str, mode: str, common: dict[str, Any]
    ) -> dict[int, Any]:
        """Wait for what other replicas say of a call; return their values."""
        values: dict[int, Any] = {}
        for peer in peers:
            message = decode(self.receive(peer, f"its part in {call}()"))
            their_call, their_mode, theirs, values[peer] = message
            self._check(call, mode, their_call, their_mode, peer)
            for name, value in common.items():
                if theirs[name] != value:
                    here, there = self._names(peer)
                    raise CallMismatchError(
                        f"{here} calls {call}() with {name} {value!r}, {there} with "
                        f"{theirs[name]!r}: all replicas need the same "
                        "(stage.sum_over_replicas() adds up what each has counted)"
                    )
        return values

    # -- messages --------------------------------------------------------------------------------

    def send(self, peer: int, message: bytes) -> None:
        """Send a message to another rank; never blocks. Messages of one rank arrive in order."""
        self._mesh.send(peer, CONTROL, 0, 0, message)

    def receive(self, peer: int, what: str) -> bytes:
        """Wait for the next message of a peer; ``what`` names it in errors."""
        arrived = self._arrived[peer]
        name = self._mesh.name_of(peer)
        self._mesh.wait(lambda: arrived, lambda: f"{what} from {name}", peer=peer)
        return arrived.popleft()

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
        first, *others = range(len(self._arrived) + 1) if ranks is None else ranks
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
        self._arrived[peer].append(bytes(body))

    # -- errors ----------------------------------------------------------------------------------

    def _check(self, call: str, mode: str, their_call: str, their_mode: str, peer: int) -> None:
        """Check that another rank is in the same call and mode."""
        if call != their_call:
            here, there = self._names(peer)
            raise CallMismatchError(
                f"{here} is in {call}() while {there} is in {their_call}(): every rank must make "
                "the same calls in the same order"
            )
        if mode != their_mode:
            here, there = self._names(peer)
            raise CallMismatchError(
                f"{here} calls {call}() in {mode}, {there} in {their_mode}: call train(), eval() "
                "and torch.no_grad() on every rank alike"
            )

    def _names(self, peer: int) -> tuple[str, str]:
        return self._grid.rank_name(self._grid.rank), self._grid.rank_name(peer)
