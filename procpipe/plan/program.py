"""From a plan to the program of each stage: what it runs, sends and receives, in order.

The clock of a plan is logical: no stage waits for a cycle to end. What the cycles give is one
total order that every stage shares: after cycle ``k`` comes its fence, a list of the transfers of
all tensors made in the cycle, the same list on every stage.

    cycle 0   F0@0
              ─── fence 0:  activation 0: 0->1
    cycle 1   F1@0   F0@1
              ─── fence 1:  activation 1: 0->1,  activation 0: 1->2
    cycle 2   F2@0   F1@1   F0@2
              ─── fence 2:  …

**Why fences.** Let a send block until its receive has been posted (a rendezvous: gloo is like
that, and every other transport is when its buffers are full). Two stages that both send first, or
that post a receive no sooner than they come to need the tensor, can then wait for each other in a
ring. With fences they cannot. Take the first transfer, in the total order, that has not been made:
each of its ends has done all that comes before it, so both are at this transfer.

**Why receives are hoisted.** A receive that is posted no sooner than its fence leaves the sender
waiting and the link idle while the receiver computes. So it moves up, past one task of its own
stage, and the tensor arrives while the task before its use is running:

    at its fence    run F0@1   receive activation 1: 0->1   send activation 0: 1->2   run F1@1
    hoisted         receive activation 1: 0->1   run F0@1   send activation 0: 1->2   run F1@1

Posting does not block, so posting sooner makes no stage wait that did not wait before:
the argument above still holds. It costs one more buffer, and no more than that; a receive
further ahead would hold memory (and, on a GPU, the cores that a waiting receive occupies) for
nothing. All receives move up by the same number of tasks, so each channel keeps its order.

**The loss** goes behind the last gradient on each hop, in the same order at both ends. By then the
last partition has all of it. To pass it on a stage waits for no more than that gradient, and the
last stage adds it up while the others end. Without gradients it passes at the end of the program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from procpipe.plan.routes import GRADIENT, Routes, Transfer
from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Take in what the task needs, waiting for it if it must, and run the task.

    All but the task is for the stage's runner, and left out of comparisons.
    """

    task: Task  # the task
    #: What it uses of other partitions, those of its own stage included, in order.
    takes: tuple[Transfer, ...] = field(default=(), compare=False)
    #: What it makes for other partitions, those of its own stage included, in order.
    makes: tuple[Transfer, ...] = field(default=(), compare=False)
    #: Of a forward task, whether its recompute task follows.
    is_recomputed: bool = field(default=False, compare=False)
    #: Of a forward task, whether its backward will be two tasks, I and W.
    is_split: bool = field(default=False, compare=False)
    #: Whether it is the last task that adds to the gradients of its partition.
    adds_last: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"run {self.task}"


@dataclass(frozen=True, slots=True)
class Send:
    """Send what the stage has made."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """From here on a buffer may be posted for this message; does not wait for it.

    The message is taken when the task that needs it runs; the loss, at the end of the program.
    """

    transfer: Transfer

    def __str__(self) -> str:
        return f"receive {self.transfer}"


Step = Run | Send | Receive
Program = tuple[Step, ...]


def program(
    plan: Plan,
    routes: Routes,
    stage: int,
    *,
    recompute: Collection[int] = (),
    has_loss: bool = False,
) -> Program:
    """Make the program of one stage.

    Looks only at the stages that exchange tensors with this one, so it stays quick with thousands.

    Args:
        plan: the plan.
        routes: where its tensors go.
        stage: the stage.
        recompute: the micro-batches that a later plan recomputes, if this one has no backward.
        has_loss: whether the loss passes the stages.
    """
    row, tasks = plan.row(stage), {*plan.tasks_of(stage)}
    last = last_additions(plan.tasks_of(stage))
    if not plan.has_backward:
        tasks |= {Task(RECOMPUTE, i, task.j) for i in recompute for task in tasks}
    # A stable sort by place and rank. For the p-th task of the stage, rank
    #     0    receives that were hoisted to it; past the first task, at the start of the program
    #     1    the task
    #     2    its fence, and the fences up to the stage's next task
    placed: list[tuple[tuple[int, int], Step]] = [
        ((p, 1), _run(task, tasks, last, routes)) for p, (_, task) in enumerate(row)
    ]
    num_done = 0  # tasks of this stage in the cycles up to the fence
    makers = sorted({stage, *routes.sources(stage)})
    ours = (one for maker in makers for one in routes.sent(plan, maker))
    fenced = (one for one in ours if stage in routes.stages_of(one[1]))
    for k, transfer in sorted(fenced, key=itemgetter(0)):  # stable: within a fence by maker
        while num_done < len(row) and row[num_done][0] <= k:
            num_done += 1
        before = num_done - 1  # the task that precedes the fence
        if routes.placement[transfer.source] == stage:
            placed.append(((before, 2), Send(transfer)))
        else:
            placed.append(((before, 0), Receive(transfer)))
    placed.sort(key=itemgetter(0))
    steps = tuple([step for _, step in placed])
    return _with_loss(steps, routes, stage) if has_loss else steps


def _with_loss(steps: Program, routes: Routes, stage: int) -> Program:
    """Add the steps in which a stage receives the loss and passes it on."""
    placed: list[tuple[int, Step]] = [*enumerate(steps)]
    last = {
        step.transfer._replace(i=0): k
        for k, step in placed
        if not isinstance(step, Run) and step.transfer.payload == GRADIENT
    }
    for end, kind in ((1, Receive), (0, Send)):
        placed += [
            (last.get(hop._replace(payload=GRADIENT), len(steps)), kind(hop))
            for hop in routes.loss_hops
            if routes.stages_of(hop)[end] == stage
        ]
    placed.sort(key=itemgetter(0))  # stable: behind the gradient
    return tuple([step for _, step in placed])


def last_additions(tasks: Sequence[Task]) -> dict[int, Task]:
    """Return the last task that adds to each partition's gradients, the last of all first.

    Args:
        tasks: those of a stage, in order.
    """
    found: dict[int, Task] = {}
    for task in reversed(tasks):
        if task.kind in (BACKWARD, WEIGHT_GRADIENT):
            found.setdefault(task.j, task)
    return found


def _run(task: Task, tasks: Collection[Task], last: Mapping[int, Task], routes: Routes) -> Run:
    """Add what the runner needs to a task; ``tasks`` are all of its stage."""
    kind, i, j = task
    is_recomputed = kind == FORWARD and (RECOMPUTE, i, j) in tasks
    return Run(
        task,
        tuple(routes.used_by(task)),
        tuple(routes.made_by(task)),
        is_recomputed=is_recomputed,
        is_split=kind == FORWARD and (INPUT_GRADIENT, i, j) in tasks,
        adds_last=task == last.get(j),
    )
