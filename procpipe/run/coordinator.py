"""Rank 0 decides each call and the others follow: which plan, which sizes, which mode.

    rank 0:  issue(order) ──────────────────────>  every other rank: follow(call)
             chooses a plan, verifies it once,      checks that it is in the same call and mode,
             names it by digest; its text goes      reads the plan once, makes its program once
             along the first time

A rank in another call than rank 0 is an error on all ranks, not a hang.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from procpipe.errors import CallMismatchError, MemoryLimitError
from procpipe.job.grid import Grid
from procpipe.plan.program import Program, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run.chooser import Chooser, FixedSchedule, choose_for_all
from procpipe.run.control import Control
from procpipe.run.messages import ROUTED, Order, StepDetail, decode_order, encode

#: Made once for each number of micro-batches.
_backward_plan, _forward_plan = cache(backward_plan), cache(forward_plan)


class Coordinator:
    """Issues orders on rank 0 and follows them elsewhere.

    ``chooser`` decides, on rank 0, the plan of a ``step`` with its backward.

    Attributes:
        ahead: how many tasks ahead a receive is posted, the same on every rank; set by benchmarks.
        schedule: the name of the plan of the newest step, if it was chosen by measurements.
    """

    def __init__(
        self, control: Control, grid: Grid, routes: Routes, chooser: Chooser | None = None
    ) -> None:
        self.ahead = 1
        self.schedule = ""
        self._control = control
        self._grid = grid
        self._routes = routes
        self._chooser = chooser or FixedSchedule(SCHEDULES["gpipe"])
        self._plans: dict[str, Plan] = {}
        self._programs: dict[tuple[str, bool, bool, tuple[int, ...]], Program] = {}
        self._sent: set[tuple[int, str]] = set()

    def issue(self, order: Order) -> Order:
        """Send an order from rank 0 to every other rank; never blocks.

        If it has micro-batches, a plan is chosen for those of each replica. Returns the order of
        rank 0's replica, with its plan.

        Raises:
            MemoryLimitError: no plan keeps to the memory allowed; the other ranks find it too.
        """
        orders = [order.of_replica(replica) for replica in range(self._grid.num_replicas)]
        if order.call == "step" and order.keeps_graph and any(own.sizes for own in orders):
            orders = self._choose_whole(orders)
        orders = [self._planned(own, replica) for replica, own in enumerate(orders)]
        messages = [encode(own) for own in orders]
        for rank in range(1, self._grid.num_ranks):
            self._control.send(rank, messages[rank // self._grid.num_stages])  # step 3
        return orders[0]

    def _planned(self, order: Order, replica: int) -> Order:
        """Return a replica's order with its plan; a replica without micro-batches needs none."""
        if order.sizes:
            order = order if order.plan else self._with_plan(order, self._plan_in_part(order))
            self.program(order)  # verifies, before any rank starts
            if (replica, order.plan) not in self._sent:
                self._sent.add((replica, order.plan))
                order = replace(order, plan_text=self.plan(order).to_text())
        return order

    def follow(self, ours: Order) -> Order:
        """Wait for rank 0's next order and check that it is for the call we are in.

        Raises:
            CallMismatchError: rank 0 is in another call or mode.
            MemoryLimitError: rank 0 finds no plan that keeps to the memory allowed.
        """
        order = decode_order(self._control.receive(0, f"the order for {ours.call}()"))
        self.check(ours, order)
        if isinstance(order.detail, StepDetail):
            if order.detail.lacks:
                raise MemoryLimitError(order.detail.lacks)
            self.schedule = order.detail.schedule
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
                verify(plan, routes, ahead=self.ahead)
            self._programs[key] = program(  # step 2
                plan,
                routes,
                self._grid.stage,
                ahead=self.ahead,
                recompute=order.recompute,
                has_loss=has_loss,
            )
        return self._programs[key]

    def plan(self, order: Order) -> Plan:
        """Return an order's plan."""
        return self._plans[order.plan]

    def _routes_of(self, order: Order) -> Routes:
        return replace(self._routes, target=_has_target(order))

    def _choose_whole(self, orders: list[Order]) -> list[Order]:
        order, routes = orders[0], self._routes_of(orders[0])
        cases = [(len(own.sizes), own.recompute) for own in orders]
        try:
            choice, plans = choose_for_all(self._chooser, cases, order.input_bytes, routes)
        except MemoryLimitError as error:
            self._control.send_to_all(encode(replace(order, detail=StepDetail(lacks=error.lacks))))
            raise
        if choice.schedule:
            self.schedule = choice.schedule
            detail = StepDetail(choice.schedule, choice.measure)
            orders = [replace(own, detail=detail) for own in orders]
        return list(map(self._with_plan, orders, plans))

    def _plan_in_part(self, order: Order) -> Plan:
        m, n, placement = len(order.sizes), self._routes.num_stages, self._routes.placement
        if order.call == "backward":
            return _backward_plan(m, n, order.recompute, placement)
        return _forward_plan(m, n, placement)  # also of a step without gradients

    def _with_plan(self, order: Order, plan: Plan | None) -> Order:
        if plan is not None:
            self._plans[plan.digest] = plan
        return order if plan is None else replace(order, plan=plan.digest)

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
