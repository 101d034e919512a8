"""Each call of all ranks: the first rank of a replica decides it, and replicas compare it.

    first rank of a replica                    its other ranks
    issue: chooses a plan, verifies it once, ──> follow: check that they are in the same call and
    names it by digest; its text goes along      mode, read the plan once, make a program once
    the first time

    a stage                                    the same stage of each other replica
    announce: its call, what it counts       ──> meet: in the same call? what all count together
                                             <──

A replica waits for no other before it works: ``meet`` is called before the first thing that is
added up over replicas, on the last stage the loss's gradient. What must be made in common is in
``Order.is_shared``. Between the items of loaders the first ranks compare where they are
(``next_item``). A rank in another call is an error on all ranks, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from procpipe.errors import CallMismatchError
from procpipe.job.grid import Grid
from procpipe.plan.program import Program, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan
from procpipe.plan.schedules.named import SCHEDULES, Schedule
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run.control import Control
from procpipe.run.messages import ROUTED, Order, decode, decode_order, encode

#: Made once for each number of micro-batches.
_backward_plan, _forward_plan = cache(backward_plan), cache(forward_plan)


class Coordinator:
    """One rank's side of the calls that ranks make together.

    ``schedule`` makes the plan of a ``step`` with its backward.
    """

    def __init__(
        self, control: Control, grid: Grid, routes: Routes, schedule: Schedule = SCHEDULES["gpipe"]
    ) -> None:
        self._control = control
        self._grid = grid
        self._routes = routes
        self._schedule = schedule
        self._own = grid.same_replica()
        self._is_first = grid.stage == 0
        self._made: dict[tuple[int, tuple[int, ...]], Plan] = {}  # of whole steps
        self._plans: dict[str, Plan] = {}
        self._programs: dict[tuple[str, bool, bool, tuple[int, ...]], Program] = {}
        self._sent: set[str] = set()
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
        return self.issue(ours) if self._is_first else self.follow(ours)

    def issue(self, order: Order) -> Order:
        """Send an order to the other ranks of this replica, with a plan; never blocks."""
        if order.sizes:
            plan = self._plan_of(order)
            self._plans[plan.digest] = plan
            order = replace(order, plan=plan.digest)
            self.program(order)  # verifies, before any rank starts
            if order.plan not in self._sent:
                self._sent.add(order.plan)
                order = replace(order, plan_text=plan.to_text())
        message = encode(order)
        for rank in self._own[1:]:
            self._control.send(rank, message)  # step 3
        return order

    def follow(self, ours: Order) -> Order:
        """Wait for the first rank's next order and check that it is for the call we are in."""
        message = self._control.receive(self._own[0], f"the order for {ours.call}()")
        order = decode_order(message)
        self._check(ours.call, ours.mode(), order.call, order.mode(), self._own[0])
        if order.plan_text:
            plan = Plan.from_text(order.plan_text)
            assert plan.digest == order.plan, "a plan arrives as it was sent"
            self._plans[plan.digest] = plan
        return order

    def agree_in_replica(self, ours: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring together the values of this replica's ranks, see ``Control.agree``."""
        return self._control.agree(ours, combine, self._own)

    def program(self, order: Order) -> Program:
        """Return what this stage does under an order's plan, verified on the first rank."""
        has_loss = order.call == "step"
        has_target = has_loss and order.target == ROUTED
        key = order.plan, has_target, has_loss, order.recompute
        if key not in self._programs:
            plan, routes = self.plan(order), replace(self._routes, target=has_target)
            if self._is_first:
                verify(plan, routes)
            self._programs[key] = program(  # step 2
                plan,
                routes,
                self._grid.stage,
                recompute=order.recompute,
                has_loss=has_loss,
            )
        return self._programs[key]

    def plan(self, order: Order) -> Plan:
        """Return an order's plan."""
        return self._plans[order.plan]

    def _plan_of(self, order: Order) -> Plan:
        m, n, placement = len(order.sizes), self._routes.num_stages, self._routes.placement
        if order.call == "step" and order.keeps_graph:
            key = m, order.recompute
            if key not in self._made:
                self._made[key] = self._schedule.plan(m, placement, order.recompute)
            return self._made[key]
        if order.call == "backward":
            return _backward_plan(m, n, order.recompute, placement)
        return _forward_plan(m, n, placement)  # also of a step without gradients

    # -- between replicas ------------------------------------------------------------------------

    def announce(self, order: Order, value: Any = None) -> None:
        """Send a call to the same stage of all other replicas, if they make it too; never blocks.

        ``value`` is what :meth:`meet` is to return of this replica; plain JSON.
        """
        self._announced, self._values = order, [value]
        if order.is_shared and (others := self._others()):
            self._value, self._values = value, None
            self._tell(others, order.call, order.mode(), order.common(), value)

    def meet(self) -> list[Any]:
        """Return what each replica has announced of this call; waits for them, once a call.

        Of a call that each replica makes for itself, only what this one has announced.

        Raises:
            CallMismatchError: a replica is in another call or mode, or has other arguments.
        """
        if self._values is None:
            order, others = self._announced, self._others()
            values = self._take(others, order.call, order.mode(), order.common())
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
        peers = [rank for rank in self._others() if rank not in gone]
        self._tell(peers, "batches", mode, common, ours)
        return {self._grid.rank: ours} | self._take(peers, "batches", mode, common)

    def agree(self, ours: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring together the values of all ranks of all replicas, in a call that all make."""
        self.meet()
        return self._control.agree(ours, combine)

    def _others(self) -> list[int]:
        """Return the ranks that run this stage in other replicas."""
        return [rank for rank in self._grid.same_stage() if rank != self._grid.rank]

    def _tell(
        self, peers: Sequence[int], call: str, mode: str, common: dict[str, Any], value: Any
    ) -> None:
        message = encode([call, mode, common, value])
        for peer in peers:
            self._control.send(peer, message)

    def _take(
        self, peers: Sequence[int], call: str, mode: str, common: dict[str, Any]
    ) -> dict[int, Any]:
        """Wait for what other replicas say of a call; return their values."""
        values: dict[int, Any] = {}
        for peer in peers:
            message = decode(self._control.receive(peer, f"its part in {call}()"))
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
