"""How many bytes a stage holds at each step of its program.

Counts what procpipe keeps, and what layers save for the backward pass if the costs include it; not
the model's parameters. Bytes are added when a message is received and when a task runs, and freed
when a task ends:

    receive t    + the message: an activation, which the partition keeps as its input (not counted
                   again when the task runs), a gradient of its output, a skip or a skip gradient.
                   Copies of gradients that are added up over replicas count from the task that
                   begins their all-reduce to the end of the program. The loss, one number, is not
                   counted
    run F(i,j)   + in partition 0, its input
                 + the output and what it stashes, kept as roots of the backward pass, and what
                   its layers save; if the micro-batch will be recomputed, or the plan has no
                   backward, only what it hands over to another partition of its stage
                 - at its end, all of micro-batch i, where the plan has no backward
    run R(i,j)   + the roots and what its layers save
    run B(i,j)   + the gradients that it hands over to another partition of its stage
                 - at its end, all that micro-batch i holds in this partition
    run I(i,j)   the same, but what the weights' gradients need stays
    run W(i,j)   - at its end, that

The last partition's stage holds the target of the whole mini-batch, from its first forward task on.

The count depends on the order of the program, not on time: a message counts from where its buffer
may be posted. A send counts as nothing: its tensors are held already, or freed once sent. A plan
with only backward tasks starts with what its forward plan left. Every plan ends with 0 bytes held.

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

from collections import Counter
from collections.abc import Iterator, Sequence

from procpipe.plan.program import Receive, Run, last_additions, program
from procpipe.plan.routes import SKIP, SKIP_GRADIENT, Routes, Transfer
from procpipe.plan.task import FORWARD, INPUT_GRADIENT, RECOMPUTE, WEIGHT_GRADIENT, Plan, Task
from procpipe.planner.costs import Costs


def held_bytes(plan: Plan, costs: Costs, routes: Routes, stage: int) -> Iterator[int]:
    """Yield the bytes that a stage holds: before its program, during each step, after each task."""
    tasks = plan.tasks_of(stage)
    ledger = _Ledger(plan, costs, routes, tasks)
    if FORWARD not in plan.kinds:
        ledger.hold_forward()
    at_end = 0
    if routes.placement[0] != stage == routes.placement[-1] and FORWARD in plan.kinds:
        at_end = plan.num_micro_batches * costs.target_bytes
    # By the task in which the all-reduce of a partition's gradients begins.
    last = last_additions(tasks) if costs.num_replicas > 1 else {}
    copied = {task: costs.partitions[j].trained_bytes for j, task in last.items()}
    yield ledger.held + at_end
    for step in program(plan, routes, stage):
        if isinstance(step, Receive):
            ledger.receive(step.transfer)
        if isinstance(step, Run):
            at_end += copied.get(step.task, 0)
            ledger.begin(step.task)
            yield ledger.held + at_end
            ledger.end(step.task)
        yield ledger.held + at_end
    if at_end:
        yield ledger.held


class _Ledger:
    """What one stage holds of each micro-batch in each of its partitions, by the rules above."""

    def __init__(self, plan: Plan, costs: Costs, routes: Routes, tasks: Sequence[Task]) -> None:
        self.held = 0
        self._of: Counter[tuple[int, int]] = Counter()  # the same by micro-batch and partition
        self._plan = plan
        self._costs = costs
        self._routes = routes
        self._tasks = tasks
        self._recomputed = {(i, j) for kind, i, j in tasks if kind == RECOMPUTE}

    def receive(self, transfer: Transfer) -> None:
        """Hold a message for the partition that uses it."""
        costs, ends = self._costs, sorted((transfer.source, transfer.destination))
        if transfer.payload in (SKIP, SKIP_GRADIENT):
            size = costs.skip_bytes.get((ends[0], ends[1]), 0)
        else:
            size = costs.partitions[ends[0]].output_bytes
        self._hold(transfer.i, transfer.destination, size)

    def begin(self, task: Task) -> None:
        """Hold what a task makes."""
        kind, i, j = task
        if kind == FORWARD and j == 0:
            self._hold(i, j, self._costs.input_bytes)
        is_kept = kind == FORWARD and self._plan.has_backward and (i, j) not in self._recomputed
        if kind == RECOMPUTE or is_kept:
            of_partition = self._costs.partitions[j]
            stashed = sum(size for (a, _), size in self._costs.skip_bytes.items() if a == j)
            roots = of_partition.output_bytes + stashed
            self._hold(i, j, roots + of_partition.kept_bytes)
            return
        for transfer in self._routes.made_by(task):
            if self._routes.placement[transfer.destination] == self._routes.placement[j]:
                self.receive(transfer)

    def end(self, task: Task) -> None:
        """Drop what no later task of the micro-batch needs in its partition."""
        kind, i, j = task
        if task.makes_gradient or kind == WEIGHT_GRADIENT or not self._plan.has_backward:
            self.held -= self._of.pop((i, j), 0)
        if kind == INPUT_GRADIENT:
            self._hold(i, j, self._costs.partitions[j].put_off_bytes)

    def hold_forward(self) -> None:
        """Hold what a forward plan has left to a plan of backward tasks alone."""
        for task in (task for task in self._tasks if task.makes_gradient):
            forward = task._replace(kind=FORWARD)
            for transfer in self._routes.needed(forward):
                self.receive(transfer)
            self.begin(forward)

    def _hold(self, i: int, j: int, num_bytes: int) -> None:
        self.held += num_bytes
        self._of[i, j] += num_bytes
