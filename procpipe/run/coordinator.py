"""Each call of all ranks: the first rank of a replica decides it, and replicas compare it.

    first rank of a replica                    its other ranks
    issue: names a plan by its digest; its   ──> follow: check that they are in the same call and
    text goes along the first time               mode

    a stage                                    the same stage of each other replica
    announce: its call, what it counts       ──> meet: in the same call? what all count together
                                             <──

A replica waits for no other before it works: ``meet`` is called before the first thing that is
added up over replicas, on the last stage the loss's gradient. What must be made in common is in
``Order.is_shared``. A rank in another call is an error on all ranks, not a hang.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from procpipe.channel.mesh import Mesh
from procpipe.errors import CallMismatchError
from procpipe.job.grid import IN_ORDER, Grid
from procpipe.plan.program import Program, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan
from procpipe.plan.schedules.named import Schedule
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run.order import Order

#: ``agree(ours, combine)``: every rank's value to the first, and what it makes of them to all.
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]

#: The mesh's number of the channel of these messages; those of tensors count from 1.
CONTROL = 0

#: Made once for each number of micro-batches.
_backward_plan, _forward_plan = cache(backward_plan), cache(forward_plan)


class Coordinator:
    """One rank's side of the calls that ranks make together, and its small messages to them."""

    _routes: Routes
    _plan_step: Callable[[int, tuple[int, ...], tuple[int, ...]], Plan]

    def __init__(self, mesh: Mesh, grid: Grid) -> None:
        self._mesh = mesh
        self._grid = grid
        self._own = grid.same_replica()
        #: The ranks that run this stage in other replicas.
        self._others = [rank for rank in grid.same_stage() if rank != grid.rank]
        self._plans: dict[str, Plan] = {}  # those that orders have named, by their digests
        self._arrived: dict[int, deque[bytes]] = {}
        for peer in mesh.peers:
            self._arrived[peer] = deque()
            mesh.on(peer, CONTROL, partial(self._keep, peer))
        self._announced = Order("")  # the newest call
        self._values: dict[int, Any] = {}  # what replicas have announced of it, by rank
        self._awaited: list[int] = []  # of which that is still to come

    # -- within a replica ------------------------------------------------------------------------

    def use(self, routes: Routes, schedule: Schedule) -> None:
        """Take what plans depend on, once the model is cut; they are those of a ``Schedule``."""
        self._routes, self._plan_step = routes, cache(schedule.plan)

    def begin(self, ours: Order) -> Order:
        """Begin a call: issue its order on the first rank, else follow it; return that.

        Raises:
            CallMismatchError: the first rank is in another call or mode.
        """
        return self.issue(ours) if self._grid.stage == 0 else self.follow(ours)

    def issue(self, order: Order) -> Order:
        """Send an order to the other ranks of this replica, with a plan; never blocks.

        Raises:
            PlanError: the plan of the user's schedule cannot run.
        """
        if order.sizes:
            plan = self._plan_of(order)
            order = order._replace(plan=plan.digest)
            if order.plan not in self._plans:
                verify(plan, self._routes)
                self._plans[order.plan] = plan
                order = order._replace(plan_text=plan.to_text())
        self._tell(self._own[1:], order)  # step 3
        return order

    def follow(self, ours: Order) -> Order:
        """Wait for the first rank's next order and check that it is for the call we are in."""
        order = _order_of(self._hear(self._own[0], f"the order for {ours.call}()"))
        self._check(ours, order, self._own[0])
        if order.plan_text:
            self._plans[order.plan] = Plan.from_text(order.plan_text)
        return order

    def program(self, order: Order) -> Program:
        """Make what this stage does under an order's plan."""
        return program(  # step 2
            self._plans[order.plan],
            self._routes,
            self._grid.stage,
            recompute=order.recompute,
            has_loss=order.call == "step",
        )

    def _plan_of(self, order: Order) -> Plan:
        m, n, placement = len(order.sizes), self._routes.num_stages, self._routes.placement
        if not order.makes_gradients:
            return _forward_plan(m, n, placement)
        if order.call == "backward":
            return _backward_plan(m, n, order.recompute, placement)
        return self._plan_step(m, placement, order.recompute)

    # -- between replicas ------------------------------------------------------------------------

    def announce(self, order: Order, value: Any = None) -> None:
        """Send a call to the same stage of all other replicas, if they make it too; never blocks.

        ``value`` is what :meth:`meet` is to return of this replica; plain JSON.
        """
        self._announced, self._values = order, {self._grid.rank: value}
        self._awaited = self._others if self._others and order.is_shared else []
        if self._awaited:
            self._tell(self._awaited, [order._replace(plan_text=""), value])

    def meet(self) -> list[Any]:
        """Return what each replica has announced of this call; waits for them, once a call.

        Of a call that each replica makes for itself, only what this one has announced.

        Raises:
            CallMismatchError: a replica is in another call or mode, or has other arguments.
        """
        ours, awaited, self._awaited = self._announced, self._awaited, []
        for peer in awaited:
            fields, self._values[peer] = self._hear(peer, f"its part in {ours.call}()")
            theirs = _order_of(fields)
            self._check(ours, theirs, peer)
            for name, value in ours.common().items():
                if (other := theirs.common()[name]) != value:
                    here, there = self._names(peer)
                    raise CallMismatchError(
                        f"{here} calls {ours.call}() with {name} {value!r}, {there} with "
                        f"{other!r}: all replicas need the same "
                        "(stage.sum_over_replicas() adds up what each has counted)"
                    )
        return [self._values[rank] for rank in sorted(self._values)]

    def agree_in_call(self, ours: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring together the values of all ranks of all replicas, once all are in this call."""
        self.meet()
        return self.agree(ours, combine)

    # -- messages --------------------------------------------------------------------------------

    def agree(self, ours: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring every rank's value to the first, combine them there, and return the result to all.

        Every rank calls it, and it waits for all of them.

        Args:
            ours: this rank's value; plain JSON.
            combine: makes plain JSON of the list of all values, by rank; runs on the first only.
        """
        if self._mesh.rank != 0:
            self._tell([0], ours)
            return self._hear(0, "the outcome of a common call")
        others = self._mesh.peers
        of_others = [self._hear(peer, "its part in a common call") for peer in others]
        outcome = combine([ours, *of_others])
        self._tell(others, outcome)
        return json.loads(_encode(outcome))  # as on the others

    def _tell(self, peers: Sequence[int], value: Any) -> None:
        """Send plain JSON to other ranks; never blocks. What one sends arrives in order."""
        message = _encode(value)
        for peer in peers:
            self._mesh.send(peer, CONTROL, 0, 0, message)

    def _hear(self, peer: int, what: str) -> Any:
        """Wait for the next message of a peer; ``what`` names it in errors."""
        arrived, mesh = self._arrived[peer], self._mesh
        mesh.wait(arrived.__len__, lambda: f"{what} from {mesh.name_of(peer)}", peer=peer)
        return json.loads(arrived.popleft())

    def _keep(self, peer: int, sequence: int, flags: int, body: memoryview) -> None:
        self._arrived[peer].append(bytes(body))

    def _check(self, ours: Order, theirs: Order, peer: int) -> None:
        """Check that another rank is in the same call and mode."""
        if ours[:4] == theirs[:4]:
            return
        here, there = self._names(peer)
        if ours.call != theirs.call:
            raise CallMismatchError(
                f"{here} is in {ours.call}() while {there} is in {theirs.call}(): every rank must "
                "make the same calls in the same order"
            )
        raise CallMismatchError(
            f"{here} calls {ours.call}() in {ours.mode()}, {there} in {theirs.mode()}: call "
            "train(), eval() and torch.no_grad() on every rank alike, and give the same signals on "
            "every rank"
        )

    def _names(self, peer: int) -> tuple[str, str]:
        return self._grid.rank_name(self._grid.rank), self._grid.rank_name(peer)


def _encode(message: Any) -> bytes:
    """Write an order, or any plain value, as JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def _order_of(fields: list[Any]) -> Order:
    """Read an order from JSON, which has lists for tuples."""
    return Order._make(tuple(x) if isinstance(x, list) else x for x in fields)


def compare_facts(facts: Sequence[Any], numbers: Sequence[int] = IN_ORDER) -> list[str]:
    """Say where ranks differ from rank 0, one sentence a difference.

    ``facts`` holds each rank's values by name, or what it asks rank 0 to find; ``numbers`` each
    rank's number in the job.
    """
    differences = []
    for rank, theirs in enumerate(facts):
        if isinstance(theirs, str):
            raise ValueError(
                f"rank {numbers[rank]} has arguments by which rank {numbers[0]} finds the "
                f"{theirs}, but rank {numbers[0]} has not: give every rank the same arguments"
            )
        for name, ours in facts[0].items():
            if theirs.get(name) != ours:
                ranks = numbers[0], numbers[rank]
                differences.append(_difference(name, ours, theirs.get(name), *ranks))
    if any(theirs.get("balance") != facts[0].get("balance") for theirs in facts):
        differences.append(
            "give every rank the same balance; balance_by_time() and other measurements differ "
            'from rank to rank, so use Stage(model, balance="time", sample=x), or "size": rank 0 '
            "measures, and all ranks use its balance"
        )
    return differences


def _difference(name: str, ours: Any, theirs: Any, first: int, rank: int) -> str:
    if name == "layers":
        if len(ours) != len(theirs):
            on_first = f"{len(ours)} layers on rank {first}"
            return f"the model has {on_first} and {len(theirs)} on rank {rank}"
        a, b = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
        return f"a layer of the model is ({a}) on rank {first} and ({b}) on rank {rank}"
    return f"{name} is {ours!r} on rank {first} and {theirs!r} on rank {rank}"
