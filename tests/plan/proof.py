"""Proves that a plan runs to its end: what ``plan/program.py`` only argues.

1. plan         ``verify`` finds no fault in its tasks and their order
2. transfers    the programs run the plan's tasks; every tensor is sent once, after a task has
                made it, and received once, before the task that needs it; in the same order
                at both ends, from one stage to another; so is the loss
3. deadlock     the programs end on channels without buffers
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from procpipe.plan.program import Program, Receive, Run, Send, Step, program
from procpipe.plan.routes import LOSS, Routes, Transfer
from procpipe.plan.task import Plan, Task
from procpipe.plan.verify import verify


def prove(plan: Plan, routes: Routes) -> None:
    """Prove that a plan runs to its end on any transport.

    Raises:
        PlanError: the plan has faults.
        AssertionError: its programs have one.
    """
    verify(plan, routes)
    made = programs(plan, routes)
    _check_transfers(plan, routes, made)
    waits = deadlocked(made, routes)
    assert not waits, waits


def programs(plan: Plan, routes: Routes) -> tuple[Program, ...]:
    """Make the programs of all stages; the loss passes them where there is one."""
    n, has_loss = plan.num_stages, "F" in plan.kinds
    return tuple(program(plan, routes, stage, has_loss=has_loss) for stage in range(n))


def all_skips(n: int) -> tuple[tuple[int, int], ...]:
    """Return all pairs of partitions that a skip tensor may go between."""
    return tuple(combinations(range(n), 2))


def before(task: Task) -> set[Task]:
    """Return all tasks that must be done before one, if the plan has them."""
    kind, i, j = task
    if kind == "F":
        return {Task("F", i, j - 1)} if j else set()
    if kind == "R":
        return {Task("F", i, j)}
    if kind == "W":
        return {Task("I", i, j)}
    return {Task("F", i, j), Task("R", i, j), Task("B", i, j + 1), Task("I", i, j + 1)}


def _check_transfers(plan: Plan, routes: Routes, programs: Sequence[Program]) -> None:
    #: By the stages at both ends: one queue is enough for all of their channels.
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for stage, steps in enumerate(programs):
        tasks = plan.tasks_of(stage)
        assert [step.task for step in steps if isinstance(step, Run)] == tasks, stage
        done: set[Task] = set()
        posted: set[Transfer] = set()
        for step in steps:
            if isinstance(step, Run):
                assert posted >= {*routes.needed(step.task)}, f"{step}: not all is received"
                done.add(step.task)
            elif isinstance(step, Send):
                assert done >= {*step.transfer.makers} & {*tasks}, f"{step}: it is not made yet"
                assert routes.stages_of(step.transfer)[0] == stage, step
                sent[routes.stages_of(step.transfer)].append(step.transfer)
            else:
                posted.add(step.transfer)
                received[routes.stages_of(step.transfer)].append(step.transfer)
    assert sent == received
    expected = [out for stage in range(plan.num_stages) for _, out in routes.sent(plan, stage)]
    expected += routes.loss_hops if "F" in plan.kinds else ()
    assert Counter(expected) == Counter(transfer for queue in sent.values() for transfer in queue)


def deadlocked(programs: Sequence[Program], routes: Routes) -> Mapping[int, str]:
    """Run programs as far as possible; return at which steps stages wait for one another forever.

    No transport is stricter than channels without buffers:

        receive t    posts a buffer and goes on
        send t       waits until ``receive t`` has been posted at the other end
        run task     waits until ``send t`` is done for every ``t`` that the task needs
        send loss    waits also until the loss has been sent to this stage, if another makes it

    Args:
        programs: the program of each stage, in which every transfer has its send and its receive.
        routes: what each task needs.
    """
    awaited = [[_awaited(step, routes) for step in steps] for steps in programs]
    done: set[Step] = set()
    places = [0] * len(programs)
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, steps in enumerate(programs):
            while places[stage] < len(steps) and done >= awaited[stage][places[stage]]:
                done.add(steps[places[stage]])
                places[stage] += 1
                goes_on = True
    return {
        stage: str(steps[places[stage]])
        for stage, steps in enumerate(programs)
        if places[stage] < len(steps)
    }


def _awaited(step: Step, routes: Routes) -> set[Step]:
    """Return the steps that must be done before one, as listed above."""
    if isinstance(step, Receive):
        return set()
    if isinstance(step, Run):
        return {Send(transfer) for transfer in routes.needed(step.task)}
    awaited: set[Step] = {Receive(step.transfer)}
    if step.transfer.payload == LOSS:
        here, _ = routes.stages_of(step.transfer)
        awaited |= {Send(hop) for hop in routes.loss_hops if routes.stages_of(hop)[1] == here}
    return awaited
