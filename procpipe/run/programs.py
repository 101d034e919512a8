"""The plans and programs of a pipeline, each made and verified once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from procpipe.plan.program import Program, program
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan
from procpipe.plan.schedules.named import Schedule
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run.order import Order

#: Made once for each number of micro-batches.
_backward_plan, _forward_plan = cache(backward_plan), cache(forward_plan)


@dataclass
class Programs:
    """One stage's programs."""

    routes: Routes  # where tensors go
    schedule: Schedule  # makes the plan of a ``step`` with its backward
    stage: int
    _steps: dict[tuple[int, tuple[int, ...]], Plan] = field(default_factory=dict, init=False)
    _plans: dict[str, Plan] = field(default_factory=dict, init=False)  # by digest
    _programs: dict[object, Program] = field(default_factory=dict, init=False)

    def choose(self, order: Order) -> Plan:
        """Return the plan of a call, on a first rank, which decides it.

        Raises:
            PlanError: the plan of the user's schedule cannot run.
        """
        plan = self._plan_of(order)
        if plan.digest not in self._plans:
            verify(plan, self.routes)
            self._plans[plan.digest] = plan
        return plan

    def add(self, text: str) -> None:
        """Keep a plan that the first rank has chosen."""
        plan = Plan.from_text(text)
        self._plans[plan.digest] = plan

    def plan(self, order: Order) -> Plan:
        """Return an order's plan."""
        return self._plans[order.plan]

    def program(self, order: Order) -> Program:
        """Return what this stage does under an order's plan."""
        if order.program not in self._programs:
            self._programs[order.program] = program(  # step 2
                self.plan(order),
                self.routes,
                self.stage,
                recompute=order.recompute,
                has_loss=order.call == "step",
            )
        return self._programs[order.program]

    def _plan_of(self, order: Order) -> Plan:
        m, n, placement = len(order.sizes), self.routes.num_stages, self.routes.placement
        if order.call == "step" and order.keeps_graph:
            key = m, order.recompute
            if key not in self._steps:
                self._steps[key] = self.schedule.plan(m, placement, order.recompute)
            return self._steps[key]
        if order.call == "backward":
            return _backward_plan(m, n, order.recompute, placement)
        return _forward_plan(m, n, placement)  # also of a step without gradients
