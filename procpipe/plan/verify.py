"""Proves that a plan runs to its end, or lists every fault.

    1. tasks        each task once, for an existing partition and micro-batch, one a stage and
                    cycle; every forward has its backward, whole or split, so that no tensor is
                    held after the plan (unless the plan has no backward at all)
    2. order        the inputs of a task were made in an earlier cycle
    3. transfers    the programs run the plan's tasks; every tensor is sent once and received once,
                    in the same order at both ends of its channel
    4. deadlock     the programs end on channels without buffers

A plan with only backward tasks follows one with only forward tasks, which count as done. Deadlocks
are checked only if there is no other fault, since other faults cause deadlocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from procpipe.errors import PlanError
from procpipe.plan.placement import placement_faults
from procpipe.plan.program import (
    Program,
    Receive,
    Run,
    Send,
    Step,
    all_fenced,
    bare_program,
    fences,
)
from procpipe.plan.routes import Channel, Routes, Transfer
from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
    gradient_tasks,
)

#: The cycles that contain a task, ascending; one in a correct plan.
_Cycles = Mapping[Task, Sequence[int]]


def verify(
    plan: Plan, routes: Routes, programs: Sequence[Program] | None = None, *, ahead: int = 1
) -> None:
    """Prove that a plan runs to its end on any transport.

    Args:
        plan: the plan.
        routes: where its tensors go.
        programs: the program of each stage; by default those of the plan.
        ahead: how many tasks ahead the default programs post a receive.

    Raises:
        PlanError: the plan or its programs have faults; lists all of them.
    """
    if routes.num_stages != plan.num_stages:
        counts = f"{plan.num_stages} stages and the routes {routes.num_stages}"
        raise PlanError([f"the plan has {counts}; both must be of the same model"])
    if routes.placement != plan.placement:
        places = f"{list(plan.placement)} and the routes of {list(routes.placement)}"
        raise PlanError([f"the plan has the placement {places}; both must be of the same model"])
    if misplaced := list(placement_faults(plan.placement, plan.num_stages)):
        raise PlanError(misplaced)
    cycles = _cycles_of(plan)
    faults = [*_task_faults(plan, cycles), *_order_faults(routes, cycles)]
    if programs is None and not faults:
        programs = [
            bare_program(plan, routes, stage, ahead=ahead, fenced=fenced)
            for stage, fenced in enumerate(all_fenced(plan, routes))
        ]
    if programs is not None:
        faults += _program_faults(plan, routes, programs)
        faults = faults or deadlocks(programs, routes)
    if faults:
        raise PlanError(faults)


def _cycles_of(plan: Plan) -> _Cycles:
    cycles: defaultdict[Task, list[int]] = defaultdict(list)
    for k, cycle in enumerate(plan.cycles):
        for task in cycle:
            cycles[task].append(k)
    return dict(cycles)


# 1. Tasks -----------------------------------------------------------------------------------


def _task_faults(plan: Plan, cycles: _Cycles) -> Iterator[str]:
    for task, when in cycles.items():
        if task.kind not in KINDS:
            yield f"{task} is of the unknown kind {task.kind!r}; known: {', '.join(KINDS)}"
        if not 0 <= task.i < (m := plan.num_micro_batches):
            yield f"{task} is of a micro-batch that does not exist: there are {m}, from 0"
        if not 0 <= task.j < (p := plan.num_partitions):
            yield f"{task} is of a partition that does not exist: there are {p}, from 0"
        if len(when) > 1:
            yield f"{task} comes {len(when)} times, in cycles {', '.join(map(str, when))}"
    yield from _crowded(plan)
    yield from _missing(plan, cycles)


def _crowded(plan: Plan) -> Iterator[str]:
    stages = dict(enumerate(plan.placement))
    for k, cycle in enumerate(plan.cycles):
        busy = [stages.get(task.j) for task in cycle]
        if len(set(busy)) == len(cycle):
            continue
        for stage in sorted({stage for stage in busy if stage is not None}):
            if (count := busy.count(stage)) > 1:
                tasks = " and ".join(str(task) for task in cycle if stages.get(task.j) == stage)
                yield f"stage {stage} has {count} tasks in cycle {k}: {tasks}"


def _missing(plan: Plan, cycles: _Cycles) -> Iterator[str]:
    kinds = {task.kind for task in cycles}
    backward = kinds & {BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}
    if not backward and FORWARD not in kinds:
        yield "the plan has no forward and no backward tasks"
    for i in range(plan.num_micro_batches):
        for j in range(plan.num_partitions):
            if FORWARD in kinds and (FORWARD, i, j) not in cycles:
                yield f"{Task(FORWARD, i, j)} is missing"
            if backward:
                yield from _backward_faults(i, j, cycles)
    for task in cycles:
        if task.kind == RECOMPUTE and not cycles.keys() & {*gradient_tasks(task.i, task.j)}:
            yield f"{task} recomputes for {Task(BACKWARD, task.i, task.j)}, which is missing"


def _backward_faults(i: int, j: int, cycles: _Cycles) -> Iterator[str]:
    """Find a micro-batch whose backward is missing, incomplete or duplicated."""
    whole, first = gradient_tasks(i, j)
    second = Task(WEIGHT_GRADIENT, i, j)
    if whole in cycles:
        if halves := [task for task in (first, second) if task in cycles]:
            yield f"{whole} and {' and '.join(map(str, halves))} are both there"
    elif first not in cycles and second not in cycles:
        yield f"{whole} is missing"
    else:
        for half, other in ((first, second), (second, first)):
            if half not in cycles:
                yield f"{half} is missing, but {other} is there"


# 2. Order -----------------------------------------------------------------------------------


def _order_faults(routes: Routes, cycles: _Cycles) -> Iterator[str]:
    for task, (when, *_) in cycles.items():
        for before in _local_needs(task):
            if before in cycles and cycles[before][0] >= when:
                yield f"{task} in cycle {when} needs {before}, in cycle {cycles[before][0]}"
        for transfer in routes.used_by(task):
            for maker in transfer.makers:
                if maker in cycles and cycles[maker][0] >= when:
                    yield (
                        f"{task} in cycle {when} needs '{transfer}',"
                        f" which {maker} makes in cycle {cycles[maker][0]}"
                    )


def _local_needs(task: Task) -> Sequence[Task]:
    """List the tasks that must come before on the same stage, if the plan has them."""
    _, i, j = task
    if task.makes_gradient:
        return Task(FORWARD, i, j), Task(RECOMPUTE, i, j)
    if task.kind == RECOMPUTE:
        return (Task(FORWARD, i, j),)
    if task.kind == WEIGHT_GRADIENT:
        return (Task(INPUT_GRADIENT, i, j),)
    return ()


# 3. Transfers -------------------------------------------------------------------------------


def _program_faults(plan: Plan, routes: Routes, programs: Sequence[Program]) -> Iterator[str]:
    if len(programs) != plan.num_stages:
        yield f"there are {len(programs)} programs for {plan.num_stages} stages"
        return
    out, into = defaultdict(list), defaultdict(list)
    for fence in fences(plan, routes):
        for transfer in fence:
            source, destination = routes.stages_of(transfer)
            out[source].append(transfer)
            into[destination].append(transfer)
    for stage, program in enumerate(programs):
        yield from _run_faults(stage, program, plan.tasks_of(stage))
        yield from _differences(stage, "send", out[stage], _transfers(program, Send))
        yield from _differences(stage, "receive", into[stage], _transfers(program, Receive))
        yield from _place_faults(stage, program, plan, routes)
    yield from _channel_faults(programs)


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
    for _, task, transfer in routes.tied_gradients(plan, stage):
        if sends.get(transfer, len(program)) < runs.get(task, -1):
            yield f"stage {stage} sends '{transfer}' before {task} has added to it"


def _channel_faults(programs: Sequence[Program]) -> Iterator[str]:
    sent = _by_channel(t for program in programs for t in _transfers(program, Send))
    received = _by_channel(t for program in programs for t in _transfers(program, Receive))
    for channel in sorted(sent.keys() & received.keys()):
        out, into = sent[channel], received[channel]
        if out != into and sorted(out) == sorted(into):
            payload, source, destination = channel
            yield (
                f"the channel {payload} {source}->{destination} carries micro-batches"
                f" {' '.join(map(str, out))} as sent and {' '.join(map(str, into))} as received"
            )


def _by_channel(transfers: Iterable[Transfer]) -> Mapping[Channel, list[int]]:
    channels: defaultdict[Channel, list[int]] = defaultdict(list)
    for transfer in transfers:
        channels[transfer.channel].append(transfer.i)
    return channels


def _transfers(program: Program, kind: type[Send | Receive]) -> list[Transfer]:
    return [step.transfer for step in program if isinstance(step, kind)]


# 4. Deadlock ---------------------------------------------------------------------------------


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
