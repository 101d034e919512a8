"""Rank 0 decides each call and the others follow: which plan, which sizes, which mode.

    rank 0:  issue(order) ──────────────────────>  every other rank: follow(call)
             makes a plan, verifies it once,        checks that it is in the same call and mode,
             names it by digest; its text goes      reads the plan once, makes its program once
             along the first time

A rank in another call than rank 0 is an error on all ranks, not a hang.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from procpipe.errors import CallMismatchError
from procpipe.job.grid import Grid
from procpipe.plan.program import Program, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan
from procpipe.plan.schedules.named import SCHEDULES, Schedule
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run.control import Control
from procpipe.run.messages import ROUTED, Order, decode_order, encode

#: Made once for each number of micro-batches.
_backward_plan, _forward_plan = cache(backward_plan), cache(forward_plan)


class Coordinator:
    """Issues orders on rank 0 and follows them elsewhere.

    ``schedule`` makes, on rank 0, the plan of a ``step`` with its backward.
    """

    def __init__(
        self,
        control: Control,
        grid: Grid,
        routes: Routes,
        schedule: Schedule = SCHEDULES["gpipe"],
    ) -> None:
        self._control = control
        self._grid = grid
        self._routes = routes
        self._schedule = schedule
        self._made: dict[tuple[int, tuple[int, ...]], Plan] = {}  # of whole steps
        self._plans: dict[str, Plan] = {}
        self._programs: dict[tuple[str, bool, bool, tuple[int, ...]], Program] = {}
        self._sent: set[tuple[int, str]] = set()

    def issue(self, order: Order) -> Order:
        """Send an order from rank 0 to every other rank; never blocks.

        If it has micro-batches, a plan is made for those of each replica. Returns the order of
        rank 0's replica, with its plan.
        """
        orders = [order.of_replica(replica) for replica in range(self._grid.num_replicas)]
        orders = [self._planned(own, replica) for replica, own in enumerate(orders)]
        messages = [encode(own) for own in orders]
        for rank in range(1, self._grid.num_ranks):
            self._control.send(rank, messages[rank // self._grid.num_stages])  # step 3
        return orders[0]

    def _planned(self, order: Order, replica: int) -> Order:
        """Return a replica's order with its plan; a replica without micro-batches needs none."""
        if order.sizes:
            plan = self._plan_for(order)
            self._plans[plan.digest] = plan
            order = replace(order, plan=plan.digest)
            self.program(order)  # verifies, before any rank starts
            if (replica, order.plan) not in self._sent:
                self._sent.add((replica, order.plan))
                order = replace(order, plan_text=self.plan(order).to_text())
        return order

    def follow(self, ours: Order) -> Order:
        """Wait for rank 0's next order and check that it is for the call we are in.

        Raises:
            CallMismatchError: rank 0 is in another call or mode.
        """
        order = decode_order(self._control.receive(0, f"the order for {ours.call}()"))
        self.check(ours, order)
        if order.plan_text:
            plan = Plan.from_text(order.plan_text)
            assert plan.digest == order.plan, "a plan arrives as it was sent"
            self._plans[plan.digest] = plan
        return order

    def program(self, order: Order) -> Program:
        """Return what this stage does under an order's plan, verified on rank 0."""
        if not order.sizes:
            return ()  # of a replica that has no samples of the mini-batch
        has_loss = order.call == "step"
        key = order.plan, _has_target(order), has_loss, order.recompute
        if key not in self._programs:
            plan, routes = self.plan(order), self._routes_of(order)
            if self._grid.rank == 0:
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

    def _routes_of(self, order: Order) -> Routes:
        return replace(self._routes, target=_has_target(order))

    def _plan_for(self, order: Order) -> Plan:
        m, n, placement = len(order.sizes), self._routes.num_stages, self._routes.placement
        if order.call == "step" and order.keeps_graph:
            key = m, order.recompute
            if key not in self._made:
                self._made[key] = self._schedule.plan(m, placement, order.recompute)
            return self._made[key]
        if order.call == "backward":
            return _backward_plan(m, n, order.recompute, placement)
        return _forward_plan(m, n, placement)  # also of a step without gradients

    def check(self, ours: Order, order: Order) -> None:
        """Check that an order of rank 0 is for the call we are in.

        Raises:
            CallMismatchError: it is for another call or mode.
        """
        grid = self._grid
        ours_name, first = grid.rank_name(grid.rank), grid.numbers[0]
        if ours.call != order.call:
            raise CallMismatchError(
                f"{ours_name} is in {ours.call}() while rank {first} is in {order.call}(): every "
                "rank must make the same calls in the same order"
            )
        if ours.mode() != order.mode():
            raise CallMismatchError(
                f"{ours_name} calls {ours.call}() in {ours.mode()}, rank {first} in "
                f"{order.mode()}: call train(), eval() and torch.no_grad() on every rank alike"
            )


def _has_target(order: Order) -> bool:
    """Return whether the target travels in a call."""
    return order.call == "step" and order.target == ROUTED
