"""Checks programs for deadlocks by running them on channels without buffers.

No transport is stricter: programs that end on unbuffered channels end on every transport.

    receive t    posts a buffer and goes on
    send t       waits until ``receive t`` has been posted at the other end
    run task     waits until ``send t`` is done for every ``t`` that the task needs

A step waits only for steps of other stages, so stages that never continue wait for each other in a
ring. Steps take no time here; ``simulate.py`` computes times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from procpipe.plan.program import Program, Receive, Run, Send, Step
from procpipe.plan.routes import Routes


class _Wait(NamedTuple):
    """A stage waits at its own step until another stage has done the awaited step."""

    step: Step
    awaited: Send | Receive


def deadlocks(programs: Sequence[Program], routes: Routes) -> list[str]:
    """Describe every ring of stages that wait for each other forever, one sentence each.

    Args:
        programs: the program of each stage, in which every transfer has its send and its receive.
        routes: what each task needs.
    """
    waits = _run(programs, routes)
    return [_story(ring, waits, routes) for ring in _rings(waits, routes)]


def _run(programs: Sequence[Program], routes: Routes) -> Mapping[int, _Wait]:
    """Run programs as far as possible; return the waits of the stages that did not end."""
    done: set[Step] = set()
    sleepers: dict[Step, int] = {}  # the stage that waits for this step
    waits: dict[int, _Wait] = {}
    places = [0] * len(programs)
    ready = deque(range(len(programs)))
    while ready:
        stage = ready.popleft()
        waits.pop(stage, None)
        while places[stage] < len(programs[stage]):
            step = programs[stage][places[stage]]
            awaited = next((other for other in _awaited(step, routes) if other not in done), None)
            if awaited is not None:
                waits[stage] = _Wait(step, awaited)
                sleepers[awaited] = stage
                break
            done.add(step)
            places[stage] += 1
            if step in sleepers:
                ready.append(sleepers.pop(step))
    return waits


def _awaited(step: Step, routes: Routes) -> Sequence[Send | Receive]:
    """List the steps of other stages that must be done before this one."""
    match step:
        case Run(task):
            return [Send(transfer) for transfer in routes.needed(task)]
        case Send(transfer):
            return [Receive(transfer)]
        case Receive():
            return []


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
