"""Rank 0 decides each call and the others follow: which plan, which sizes, which mode.

    rank 0:  issue(order) ──────────────────────>  every other rank: follow(call)
             chooses a plan, verifies it once,      checks that it is in the same call and mode,
             names it by digest; its text goes      reads the plan once, makes its program once
             along the first time

A rank in another call than rank 0 is an error on all ranks, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from procpipe.errors import CallMismatchError, MemoryLimitError
from procpipe.plan.program import Program, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan
from procpipe.plan.schedules.named import SCHEDULES, Schedule
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run.control import Control
from procpipe.run.messages import ROUTED, Order, decode_order, encode
from procpipe.tuning.auto import AutoSchedule
from procpipe.tuning.step_costs import Report


class Coordinator:
    """Issues orders on rank 0 and follows them elsewhere.

    Args:
        control: the line to the other ranks.
        rank: this rank, which is also its stage.
        routes: which partitions speak to which, on which stages.
        schedule: the plan of a ``step`` with its backward; that of rank 0 counts.
        auto: chooses that plan instead, on rank 0.

    Attributes:
        ahead: how many tasks ahead a receive is posted, the same on every rank; there to be set by
            who measures what it is worth.
    """

    def __init__(
        self,
        control: Control,
        rank: int,
        routes: Routes,
        schedule: Schedule = SCHEDULES["gpipe"],
        auto: AutoSchedule | None = None,
    ) -> None:
        self.ahead = 1
        self._control = control
        self._rank = rank
        self._routes = routes
        self._schedule = schedule
        self._auto = auto
        self._chosen: dict[tuple[str, int, frozenset[int]], Plan] = {}
        self._plans: dict[str, Plan] = {}
        self._programs: dict[tuple[str, Routes], Program] = {}
        self._told: set[str] = set()

    def issue(self, order: Order) -> Order:
        """Send an order from rank 0 to every other rank; never blocks.

        Args:
            order: what rank 0's user called. If it has micro-batches, a plan is chosen for it.

        Returns:
            The order with its plan.

        Raises:
            MemoryLimitError: no plan keeps to the memory allowed; the other ranks find it too.
        """
        if order.sizes:
            plan, order = self._choose(order)
            self.program(replace(order, plan=plan.digest))  # verifies, before anybody starts
            is_new = plan.digest not in self._told
            self._told.add(plan.digest)
            order = replace(order, plan=plan.digest, plan_text=plan.to_text() if is_new else "")
        if self._routes.num_stages > 1:
            self._control.tell_all(encode(order))
        return order

    def follow(self, ours: Order, meanwhile: Callable[[], None] | None = None) -> Order:
        """Wait for rank 0's next order and check that it is for the call we are in.

        Args:
            ours: the call this rank is in, with its modes.
            meanwhile: called now and then while no order comes; may raise.

        Raises:
            CallMismatchError: rank 0 is in another call, pipeline or mode.
            MemoryLimitError: rank 0 finds no plan that keeps to the memory allowed.
        """
        order = decode_order(self._control.hear(0, f"the order for {ours.call}()", meanwhile))
        self._check(ours, order)
        if order.call == "step" and order.detail and "lacks" in order.detail:
            raise MemoryLimitError(order.detail["lacks"])
        if order.plan_text:
            plan = Plan.from_text(order.plan_text)
            assert plan.digest == order.plan, "a plan arrives as it was sent"
            self._plans[plan.digest] = plan
        return order

    def waiting(self) -> Order | None:
        """Return the order that rank 0 has given and this rank has not followed yet, if any."""
        message = self._control.peek(0)
        return None if message is None else decode_order(message)

    def program(self, order: Order) -> Program:
        """Return what this stage does under an order's plan, verified on rank 0."""
        routes = self._routes_of(order)
        key = order.plan, routes
        if key not in self._programs:
            plan = self._plans[order.plan]
            if self._rank == 0:
                verify(plan, routes, ahead=self.ahead)
            self._programs[key] = program(plan, routes, self._rank, ahead=self.ahead)
        return self._programs[key]

    def plan_text(self, order: Order) -> str:
        """Return the text of an order's plan."""
        return self._plans[order.plan].to_text()

    def heard(self, reports: list[Any]) -> Sequence[Sequence[int]]:
        """Take on rank 0 what all ranks measured; return which stages lack memory, if any do."""
        assert self._auto is not None, "asked for by an order of its"
        try:
            self._auto.heard([Report(**report) for report in reports])
        except MemoryLimitError as error:
            return error.lacks
        return ()

    def _routes_of(self, order: Order) -> Routes:
        is_step = order.call == "step"
        return replace(self._routes, target=order.target == ROUTED and is_step, loss=is_step)

    def _choose(self, order: Order) -> tuple[Plan, Order]:
        """Choose an order's plan; return it, and the order with what else it is to say."""
        if self._auto is not None and order.call == "step" and order.keeps_graph:
            return self._choose_auto(order, self._auto)
        kind = order.call
        if kind == "step" and not order.keeps_graph:
            kind = "forward"
        key = kind, len(order.sizes), frozenset(order.recompute)
        if key not in self._chosen:
            plan = self._make(*key)
            self._chosen[key] = self._plans[plan.digest] = plan
        return self._chosen[key], order

    def _choose_auto(self, order: Order, auto: AutoSchedule) -> tuple[Plan, Order]:
        m, routes = len(order.sizes), self._routes_of(order)
        try:
            choice = auto.next(m, order.input_bytes, order.recompute, routes)
        except MemoryLimitError as error:
            self._control.tell_all(encode(replace(order, detail={"lacks": error.lacks})))
            raise
        self._plans[choice.plan.digest] = choice.plan
        detail = {"schedule": choice.schedule, "tells": choice.tells}
        return choice.plan, replace(order, detail=detail)

    def _make(self, kind: str, m: int, recompute: frozenset[int]) -> Plan:
        n, placement = self._routes.num_stages, self._routes.placement
        if kind == "forward":
            return forward_plan(m, n, placement)
        if kind == "backward":
            return backward_plan(m, n, recompute, placement)
        return self._schedule.plan(m, placement, recompute)

    def _check(self, ours: Order, order: Order) -> None:
        if ours.stage_number != order.stage_number:
            raise CallMismatchError(
                f"rank {self._rank} calls {ours.call}() of its pipeline {ours.stage_number}, rank "
                f"0 calls {order.call}() of pipeline {order.stage_number} (counted from 0 in the "
                "order they are made): every rank must make the same calls in the same order"
            )
        if ours.call != order.call:
            raise CallMismatchError(
                f"rank {self._rank} is in {ours.call}() while rank 0 is in {order.call}(): every "
                "rank must make the same calls in the same order"
            )
        if ours.mode() != order.mode():
            raise CallMismatchError(
                f"rank {self._rank} calls {ours.call}() in {ours.mode()}, rank 0 in "
                f"{order.mode()}: call train(), eval() and torch.no_grad() on every rank alike"
            )
