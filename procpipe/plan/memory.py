"""How many bytes a stage holds at each step of its program.

Counted is what procpipe itself keeps, not what a layer saves for its backward pass or what the
model's parameters take. A stage comes to hold bytes at three places and gives them back at one:

    receive t    + the message: an activation, which the stage keeps as its input (not counted
                   again when the task runs), a gradient of its output, a skip, a skip gradient
                   or a target. The loss, one number, counts as nothing
    run F(i,j)   + on stage 0, its input
                 + the output and what it stashes for other stages, kept as roots of the backward
                   pass. Not so a micro-batch that will be recomputed, nor any where the plan has
                   no backward tasks
    run R(i,j)   + the same
    run B(i,j)   - at its end, all of the above for micro-batch i
    run F(i,j)   - at its end, all of the above for micro-batch i, where the plan has no backward

So it follows from the order of the program and not from time: a received message counts from where
its buffer may be posted, whenever it arrives. A send counts as nothing: what it sends is held
already, or is gone as soon as it has left. A plan that holds only backward starts with what its
forward left. Every plan ends with nothing held.

Stage 1 of 2 with two micro-batches, micro-batch 0 recomputed, activations ``x`` of 10 bytes,
outputs ``y`` of 4, and no target:

    step                           holds          bytes
    receive activation 0: 0->1     x0                10
    receive activation 1: 0->1     x0 x1             20
    run F0@1                       x0 x1             20
    run F1@1                       x0 x1 y1          24    the peak
    run B1@1                       x0 x1 y1          24    and when it has ended, x0: 10
    send gradient 1: 1->0          x0                10
    run R0@1                       x0 y0             14
    run B0@1                       x0 y0             14    and when it has ended, nothing
    send gradient 0: 1->0                             0
"""

from __future__ import annotations

from collections.abc import Iterator

from procpipe.plan.costs import Costs
from procpipe.plan.fence import Receive, Run, Send, program
from procpipe.plan.routes import ACTIVATION, GRADIENT, SKIP, SKIP_GRADIENT, TARGET, Routes, Transfer
from procpipe.plan.task import BACKWARD, FORWARD, RECOMPUTE, Plan, Task

__all__ = ["held_bytes", "message_bytes", "peak_bytes"]


def message_bytes(transfer: Transfer, costs: Costs) -> int:
    """Tell the size of a message."""
    kind, _, source, destination = transfer
    if kind == ACTIVATION:
        return costs.output_bytes[source]
    if kind == GRADIENT:
        return costs.output_bytes[destination]
    if kind == SKIP:
        return costs.skip_bytes.get((source, destination), 0)
    if kind == SKIP_GRADIENT:
        return costs.skip_bytes.get((destination, source), 0)
    if kind == TARGET:
        return costs.target_bytes
    return 0


def peak_bytes(plan: Plan, costs: Costs, routes: Routes, stage: int) -> int:
    """Tell the most that a stage holds at any step of its program."""
    return max(held_bytes(plan, costs, routes, stage))


def held_bytes(plan: Plan, costs: Costs, routes: Routes, stage: int) -> Iterator[int]:
    """Walk through a stage's program and tell the bytes that it holds.

    Yields:
        First what is held before the program, then for each step what is held while it runs, and
        for a task also what is held after it has given back what it can.
    """
    ledger = _Ledger(plan, costs, routes, stage)
    held = ledger.before()
    yield held
    for step in program(plan, routes, stage):
        match step:
            case Receive(transfer):
                held += message_bytes(transfer, costs)
                yield held
            case Run(task):
                held += ledger.taken(task)
                yield held
                held -= ledger.given_back(task)
                yield held
            case Send():
                yield held


class _Ledger:
    """The rules above, for the tasks of one stage."""

    def __init__(self, plan: Plan, costs: Costs, routes: Routes, stage: int) -> None:
        self._plan = plan
        self._costs = costs
        self._routes = routes
        self._output = costs.output_bytes[stage] + sum(
            costs.skip_bytes.get((stage, b), 0) for b in routes.skips_from(stage)
        )
        self._own_input = costs.input_bytes if stage == 0 else 0
        self._tasks = plan.tasks_of(stage)
        self._recomputed = {task.i for task in self._tasks if task.kind == RECOMPUTE}

    def before(self) -> int:
        """Tell what a forward plan has left for this one, if this one holds only backward."""
        if self._plan.has_forward:
            return 0
        forward = [Task(FORWARD, i, j) for kind, i, j in self._tasks if kind == BACKWARD]
        return sum(self.taken(task) + self._received(task) for task in forward)

    def taken(self, task: Task) -> int:
        """Tell what a task adds to what is held."""
        if task.kind == RECOMPUTE:
            return self._output
        if task.kind == FORWARD:
            kept = self._plan.has_backward and task.i not in self._recomputed
            return self._own_input + (self._output if kept else 0)
        return 0

    def given_back(self, task: Task) -> int:
        """Tell what is held no longer once a task has ended."""
        forward = Task(FORWARD, task.i, task.j)
        if task.kind == BACKWARD:
            inputs = self._own_input + self._received(forward)
            return inputs + self._output + self._received(task)
        if task.kind == FORWARD and not self._plan.has_backward:
            return self._own_input + self._received(forward)
        return 0

    def _received(self, task: Task) -> int:
        return sum(message_bytes(transfer, self._costs) for transfer in self._routes.needed(task))
