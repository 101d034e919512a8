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
                   its layers save; not if the micro-batch will be recomputed, or the plan has no
                   backward
                 + what it hands over to another partition of its stage, unless already counted
                   as a root
    run R(i,j)   + the roots and what its layers save
    run B(i,j)   + the gradients that it hands over to another partition of its stage
                 - at its end, all that micro-batch i holds in this partition
    run I(i,j)   the same, but what the weights' gradients need stays
    run W(i,j)   - at its end, that
    run F(i,j)   - at its end, all of micro-batch i, where the plan has no backward

The last partition's stage holds the target of the whole mini-batch, from its first forward task on.
Gradients of tied parameters are received when all tasks have run.

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

from collections.abc import Callable, Iterable, Iterator

from procpipe.plan.placement import partitions_of
from procpipe.plan.program import (
    Receive,
    Run,
    Send,
    last_additions,
    program,
)
from procpipe.plan.routes import (
    ACTIVATION,
    GRADIENT,
    SKIP,
    SKIP_GRADIENT,
    Routes,
    Transfer,
)
from procpipe.plan.task import FORWARD, INPUT_GRADIENT, RECOMPUTE, WEIGHT_GRADIENT, Plan, Task
from procpipe.planner.costs import Costs


def message_bytes(transfer: Transfer, costs: Costs) -> int:
    """Return the size of a message."""
    payload, _, source, destination = transfer
    if payload == ACTIVATION:
        return costs.output_bytes[source]
    if payload == GRADIENT:
        return costs.output_bytes[destination]
    if payload == SKIP:
        return costs.skip_bytes.get((source, destination), 0)
    assert payload == SKIP_GRADIENT, f"{payload} is no message of a plan"
    return costs.skip_bytes.get((destination, source), 0)


def all_peak_bytes(plan: Plan, costs: Costs, routes: Routes) -> tuple[int, ...]:
    """Return the most bytes that each stage holds at any step of its program."""
    return tuple(max(held_bytes(plan, costs, routes, stage)) for stage in range(plan.num_stages))


def held_bytes(plan: Plan, costs: Costs, routes: Routes, stage: int) -> Iterator[int]:
    """Yield the bytes that a stage holds: before its program, during each step, after each task."""
    ledger = Holdings(plan, costs, routes, stage)
    held, at_end = ledger.before(), ledger.target()
    held += at_end
    yield held
    for step in program(plan, routes, stage):
        match step:
            case Receive(transfer):
                held += message_bytes(transfer, costs)
                yield held
            case Run(task):
                copies = ledger.copied(task)
                at_end += copies
                held += ledger.taken(task) + copies
                yield held
                held -= ledger.given_back(task)
                yield held
            case Send():
                yield held
    tied = sum(costs.tied_into(stage, plan).values())
    if tied:
        yield held + tied
    if tied or at_end:
        yield held - at_end


class Holdings:
    """The rules above, for the tasks of one stage."""

    def __init__(self, plan: Plan, costs: Costs, routes: Routes, stage: int) -> None:
        self._plan = plan
        self._stage = stage
        self._costs = costs
        self._routes = routes
        self._roots = {
            j: costs.output_bytes[j]
            + sum(costs.skip_bytes.get((j, b), 0) for b in routes.skips_from(j))
            for j in partitions_of(routes.placement, stage)
        }
        self._has_neighbours = len(self._roots) > 1
        self._needed_bytes: dict[tuple[str, int], int] = {}  # by kind of task and partition
        self._tasks = plan.tasks_of(stage)
        self._recomputed = {(i, j) for kind, i, j in self._tasks if kind == RECOMPUTE}
        self._copied: dict[Task, int] = {}  # by the task in which a partition's all-reduce begins
        if costs.num_replicas > 1:
            last = last_additions(self._tasks)
            self._copied = {task: costs.gradient_bytes[j] for j, task in last.items()}

    def before(self) -> int:
        """Return the bytes that a forward plan left, if this plan has only backward tasks."""
        if self._plan.has_forward:
            return 0
        forward = [Task(FORWARD, t.i, t.j) for t in self._tasks if t.makes_gradient]
        return sum(self.taken(task) + self._needed(task) for task in forward)

    def target(self) -> int:
        """Return the bytes of the target, which comes from stage 0, if this stage uses it."""
        placement = self._routes.placement
        is_sent = placement[0] != placement[-1] and placement[-1] == self._stage
        is_used = is_sent and self._plan.has_forward
        return self._plan.num_micro_batches * self._costs.target_bytes if is_used else 0

    def taken(self, task: Task) -> int:
        """Return the bytes that a task adds when it runs."""
        kind, i, j = task
        if kind == RECOMPUTE:
            return self._roots[j] + self._costs.saved_bytes[j]
        if kind == FORWARD:
            own_input = self._costs.input_bytes if j == 0 else 0
            if self._is_kept(i, j):
                return own_input + self._roots[j] + self._costs.saved_bytes[j]
            return own_input + self._handed(self._routes.made_by, task)
        if task.makes_gradient:
            return self._handed(self._routes.made_by, task)
        return 0

    def given_back(self, task: Task) -> int:
        """Return the bytes that a task frees when it ends."""
        kind, i, j = task
        forward = Task(FORWARD, i, j)
        if kind == WEIGHT_GRADIENT:
            return self._costs.put_off_bytes[j]
        if task.makes_gradient:
            put_off = self._costs.put_off_bytes[j] if kind == INPUT_GRADIENT else 0
            roots = self._roots[j] + self._costs.saved_bytes[j] - put_off
            used = self._needed(task) + self._handed(self._routes.used_by, task)
            return self._inputs(forward) + roots + used
        if kind == FORWARD and not self._plan.has_backward:
            return self._inputs(forward)
        return 0

    def copied(self, task: Task) -> int:
        """Return the bytes of the gradients whose all-reduce begins in a task."""
        return self._copied.get(task, 0)

    def _is_kept(self, i: int, j: int) -> bool:
        return self._plan.has_backward and (i, j) not in self._recomputed

    def _inputs(self, forward: Task) -> int:
        """Return the bytes of a forward task's inputs."""
        own_input = self._costs.input_bytes if forward.j == 0 else 0
        return own_input + self._needed(forward) + self._handed(self._routes.used_by, forward)

    def _needed(self, task: Task) -> int:
        """Return the bytes of a task's messages, which are as many for every micro-batch."""
        key = task.kind, task.j
        if key not in self._needed_bytes:
            self._needed_bytes[key] = sum(map(self._size, self._routes.needed(task)))
        return self._needed_bytes[key]

    def _handed(self, transfers_of: Callable[[Task], Iterable[Transfer]], task: Task) -> int:
        """Return the bytes of what stays on its stage of a task's transfers."""
        if not self._has_neighbours:
            return 0
        return sum(self._counted(t) for t in transfers_of(task) if self._stays(t))

    def _counted(self, transfer: Transfer) -> int:
        """Return the bytes of a handover; 0 if its maker counts them as a root."""
        if transfer.payload in (ACTIVATION, SKIP) and self._is_kept(transfer.i, transfer.source):
            return 0
        return self._size(transfer)

    def _size(self, transfer: Transfer) -> int:
        return message_bytes(transfer, self._costs)

    def _stays(self, transfer: Transfer) -> bool:
        source, destination = self._routes.stages_of(transfer)
        return source == destination
