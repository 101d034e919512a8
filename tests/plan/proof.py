"""Proves that a plan runs to its end, or lists every fault: what ``plan/program.py`` only argues.

    1. plan         ``verify`` finds no fault in its tasks and their order
    2. transfers    the programs run the plan's tasks; every tensor is sent once and received once,
                    in the same order at both ends, from one stage to another; so is the loss
    3. deadlock     the programs end on channels without buffers

Deadlocks are checked only if there is no other fault, since other faults cause deadlocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from procpipe.errors import PlanError
from procpipe.plan.program import Program, Receive, Run, Send, Step, program
from procpipe.plan.routes import LOSS, Routes, Transfer
from procpipe.plan.task import Plan, Task
from procpipe.plan.verify import verify


def prove(plan: Plan, routes: Routes, steps: Sequence[Program] | None = None) -> None:
    """Prove that a plan, by default with its own programs, runs to its end on any transport.

    Raises:
        PlanError: the plan or its programs have faults; lists all of them.
    """
    verify(plan, routes)
    made = programs(plan, routes) if steps is None else steps
    if faults := [*_program_faults(plan, routes, made)] or deadlocks(made, routes):
        raise PlanError(faults)


def programs(plan: Plan, routes: Routes) -> tuple[Program, ...]:
    """Make the programs of all stages; the loss passes them where there is one."""
    n, has_loss = plan.num_stages, plan.has_forward
    return tuple(program(plan, routes, stage, has_loss=has_loss) for stage in range(n))


def fences(plan: Plan, routes: Routes) -> list[tuple[Transfer, ...]]:
    """List the transfers after each cycle: by the stage that sends, then as its task sends them."""
    found: list[list[Transfer]] = [[] for _ in plan.cycles]
    for stage in range(plan.num_stages):
        for k, transfer in routes.sent(plan, stage):
            found[k].append(transfer)
    return [tuple(fence) for fence in found]


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


# Transfers ----------------------------------------------------------------------------------


def _program_faults(plan: Plan, routes: Routes, programs: Sequence[Program]) -> Iterator[str]:
    if len(programs) != plan.num_stages:
        yield f"there are {len(programs)} programs for {plan.num_stages} stages"
        return
    out, into = defaultdict(list), defaultdict(list)
    for fence in [*fences(plan, routes), routes.loss_hops if plan.has_forward else ()]:
        for transfer in fence:
            source, destination = routes.stages_of(transfer)
            out[source].append(transfer)
            into[destination].append(transfer)
    for stage, steps in enumerate(programs):
        yield from _run_faults(stage, steps, plan.tasks_of(stage))
        yield from _differences(stage, "send", out[stage], _transfers(steps, Send))
        yield from _differences(stage, "receive", into[stage], _transfers(steps, Receive))
        yield from _place_faults(stage, steps, plan, routes)
    yield from _order_faults(programs, routes)


def _run_faults(stage: int, program: Program, tasks: Sequence[Task]) -> Iterator[str]:
    runs = [step.task for step in program if isinstance(step, Run)]
    yield from _differences(stage, "run", tasks, runs)
    if runs != tasks and Counter(runs) == Counter(tasks):
        for run, task in zip(runs, tasks, strict=True):
            if run != task:
                yield f"stage {stage} runs {run} where the plan has {task}"


def _differences(
    stage: int, verb: str, expected: Sequence[object], found: Sequence[object]
) -> Iterator[str]:
    """Describe the steps that a program lacks, adds or repeats."""
    if found == expected:
        return
    right, real = Counter(expected), Counter(found)
    for thing in right | real:
        if not real[thing]:
            yield f"stage {stage} does not {verb} '{thing}'"
        elif not right[thing]:
            yield f"stage {stage} would {verb} '{thing}', which the plan does not have there"
        elif real[thing] != right[thing]:
            yield f"stage {stage} would {verb} '{thing}' {real[thing]} times, not {right[thing]}"


def _place_faults(stage: int, program: Program, plan: Plan, routes: Routes) -> Iterator[str]:
    """Find sends before the task that makes the tensor, and receives after the one that uses it."""
    # The first place of each step.
    runs: dict[Task, int] = {}
    sends: dict[Transfer, int] = {}
    receives: dict[Transfer, int] = {}
    for index, step in reversed([*enumerate(program)]):
        if isinstance(step, Run):
            runs[step.task] = index
        else:
            (sends if isinstance(step, Send) else receives)[step.transfer] = index
    for transfer, index in sends.items():
        for maker in transfer.makers:
            if index < runs.get(maker, -1):
                yield f"stage {stage} sends '{transfer}' before {maker} has made it"
    for task, index in runs.items():
        for transfer in routes.needed(task):
            if index < receives.get(transfer, -1):
                yield f"stage {stage} posts '{transfer}' only after {task}, which needs it"


def _order_faults(programs: Sequence[Program], routes: Routes) -> Iterator[str]:
    """Compare all that goes from one stage to another: one queue is enough for its channels."""
    sent, received = (_by_stages(programs, kind, routes) for kind in (Send, Receive))
    for source, destination in sorted(sent.keys() & received.keys()):
        out, into = sent[source, destination], received[source, destination]
        if out != into and sorted(out) == sorted(into):
            yield (
                f"stage {source} sends {', '.join(map(str, out))} to stage {destination}, which "
                f"receives {', '.join(map(str, into))}"
            )


def _by_stages(
    programs: Sequence[Program], kind: type[Send | Receive], routes: Routes
) -> Mapping[tuple[int, int], list[Transfer]]:
    found: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for steps in programs:
        for transfer in _transfers(steps, kind):
            found[routes.stages_of(transfer)].append(transfer)
    return found


def _transfers(program: Program, kind: type[Send | Receive]) -> list[Transfer]:
    return [step.transfer for step in program if isinstance(step, kind)]


# Deadlock -----------------------------------------------------------------------------------


class _Wait(NamedTuple):
    """A stage waits at its own step until another stage has done the awaited step."""

    step: Step
    awaited: Send | Receive


def deadlocks(programs: Sequence[Program], routes: Routes) -> list[str]:
    """Describe every ring of stages that wait for each other forever, one sentence each.

    No transport is stricter than channels without buffers:

        receive t    posts a buffer and goes on
        send t       waits until ``receive t`` has been posted at the other end
        run task     waits until ``send t`` is done for every ``t`` that the task needs
        send loss    waits also until the loss has been sent to this stage, if another makes it

    A step waits only for steps of other stages, so stages that never continue wait for each other
    in a ring.

    Args:
        programs: the program of each stage, in which every transfer has its send and its receive.
        routes: what each task needs.
    """
    waits = _run_unbuffered(programs, routes)
    return [_story(ring, waits, routes) for ring in _rings(waits, routes)]


def _run_unbuffered(programs: Sequence[Program], routes: Routes) -> Mapping[int, _Wait]:
    """Run programs as far as possible; return the waits of the stages that did not end."""
    sent: set[Transfer] = set()
    posted: set[Transfer] = set()
    sleepers: dict[tuple[type[Step], Transfer], int] = {}  # the stage that waits for this step
    waits: dict[int, _Wait] = {}
    places = [0] * len(programs)
    ready = deque(range(len(programs)))
    while ready:
        stage = ready.popleft()
        waits.pop(stage, None)
        while places[stage] < len(programs[stage]):
            step = programs[stage][places[stage]]
            awaited = _awaited(step, routes, sent, posted)
            if awaited is not None:
                waits[stage] = _Wait(step, awaited)
                sleepers[type(awaited), awaited.transfer] = stage
                break
            places[stage] += 1
            if not isinstance(step, Run):
                (sent if isinstance(step, Send) else posted).add(step.transfer)
                if (key := (type(step), step.transfer)) in sleepers:
                    ready.append(sleepers.pop(key))
    return waits


def _awaited(
    step: Step, routes: Routes, sent: Collection[Transfer], posted: Collection[Transfer]
) -> Send | Receive | None:
    """Return a step of another stage that must be done before this one, and is not; if any."""
    if isinstance(step, Run):
        for transfer in routes.needed(step.task):
            if transfer not in sent:
                return Send(transfer)
    elif isinstance(step, Send) and step.transfer not in posted:
        return Receive(step.transfer)
    elif isinstance(step, Send) and step.transfer.payload == LOSS:
        here, _ = routes.stages_of(step.transfer)
        for hop in routes.loss_hops:
            if routes.stages_of(hop)[1] == here and hop not in sent:
                return Send(hop)
    return None


def _rings(waits: Mapping[int, _Wait], routes: Routes) -> list[list[int]]:
    rings = []
    seen: set[int] = set()
    for first in sorted(waits):
        path: list[int] = []
        stage = first
        while stage in waits and stage not in seen:
            seen.add(stage)
            path.append(stage)
            stage = _owner(waits[stage].awaited, routes)
        if stage in path:
            rings.append(path[path.index(stage) :])
    return rings


def _owner(step: Send | Receive, routes: Routes) -> int:
    source, destination = routes.stages_of(step.transfer)
    return source if isinstance(step, Send) else destination


def _story(ring: Sequence[int], waits: Mapping[int, _Wait], routes: Routes) -> str:
    parts = [
        f"stage {stage} waits at '{waits[stage].step}' until stage "
        f"{_owner(waits[stage].awaited, routes)} reaches '{waits[stage].awaited}'"
        for stage in ring
    ]
    return "deadlock: " + "; ".join(parts)
