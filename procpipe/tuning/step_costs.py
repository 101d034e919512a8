r"""What ranks report of a measured step, and the costs that follow from it.

A message from one stage to the next cannot be timed with two clocks that do not agree. But a
round trip can, as each stage reads only its own clock:

    stage j      [F i]········ gap above ········[B i]       from the end of F to the start of B
                      \                         /
    stage j+1          [F i]·· gap below ··[B i]             from the start of F to the end of B

The gap above less the gap below is the way there, the way back, and the time that the
messages waited for a busy stage. The least over all micro-batches is used, in which they
waited least: a pipeline's first micro-batch meets idle stages. Half of it is one way.

PURE: no sockets, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from procpipe.plan.costs import Costs
from procpipe.plan.routes import ACTIVATION, ROOTS, SKIP, TARGET, TIED_GRADIENT, Routes
from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Task,
)


@dataclass
class Report:
    """What one rank reports of a step."""

    step_s: float = 0.0  # seconds of the step
    #: For a kind of task and a partition, the median of its seconds.
    seconds: list[tuple[str, int, float]] = field(default_factory=list)
    #: For a partition and a micro-batch, the gaps above and below.
    gaps_s: list[tuple[int, int, float, float]] = field(default_factory=list)
    #: For a payload, its source and destination, the bytes of the largest message.
    sizes: list[tuple[str, int, int, int]] = field(default_factory=list)
    #: For a partition, what autograd keeps inside its layers; of each micro-batch.
    saved: list[tuple[int, int]] = field(default_factory=list)
    #: For a partition, what is kept between the halves of a backward; of each one.
    put_off: list[tuple[int, int]] = field(default_factory=list)


def report_of_times(tasks: Iterable[tuple[Task, float, float]], step_s: float) -> Report:
    """Report a step's times.

    Args:
        tasks: what this stage ran, each from when to when, in seconds of its own clock.
        step_s: seconds of the step.
    """
    times = {task: (start_s, end_s) for task, start_s, end_s in tasks}
    by_kind: dict[tuple[str, int], list[float]] = {}
    for (kind, _, j), (start_s, end_s) in times.items():
        by_kind.setdefault((kind, j), []).append(end_s - start_s)
    report = Report(step_s, [(kind, j, median(s)) for (kind, j), s in by_kind.items()])
    for task, (start_s, end_s) in times.items():
        _, i, j = task
        if task.makes_gradient:
            forward_start_s, forward_end_s = times[Task(FORWARD, i, j)]
            report.gaps_s.append((j, i, start_s - forward_end_s, end_s - forward_start_s))
    return report


def costs_of(
    of_bytes: Sequence[Sequence[Report]], of_seconds: Sequence[Sequence[Report]], routes: Routes
) -> Costs:
    """Make costs of what all ranks have reported.

    Args:
        of_bytes: for each step whose bytes were measured, the reports of all ranks. Several
            replicas come one after the other; of a stage's seconds, those of the slowest count.
        of_seconds: the same of the steps that were timed.
        routes: of those steps, within a replica.
    """
    p, n = len(routes.placement), routes.num_stages
    sized = list(chain(*of_bytes))
    timed = [  # of each replica of each step
        (first, reports[first : first + n])
        for reports in of_seconds
        for first in range(0, len(reports), n)
    ]
    sizes = _largest((key[:-1], key[-1]) for report in sized for key in report.sizes)
    skips = {(a, b): sizes.get((SKIP, a, b), 0) for a, b in routes.skips}
    seconds: dict[tuple[str, int], dict[int, list[float]]] = {}  # by the replica
    for replica, reports in timed:
        for kind, j, of_task_s in chain(*(report.seconds for report in reports)):
            seconds.setdefault((kind, j), {}).setdefault(replica, []).append(of_task_s)

    def all_seconds(kind: str) -> tuple[float, ...]:
        of_kind = (seconds.get((kind, j), {}).values() for j in range(p))
        return tuple(max(map(median, of_replicas), default=0.0) for of_replicas in of_kind)

    def output_bytes(j: int) -> int:
        stashed = sum(skips[a, b] for a, b in routes.skips if a == j)
        roots = sizes.get((ROOTS, j, j), 0) - stashed
        return max(roots, sizes.get((ACTIVATION, j, j + 1), 0))

    outputs = tuple(map(output_bytes, range(p)))
    hops_s = tuple(_hops_s([reports for _, reports in timed], routes))
    tied_bytes: dict[tuple[int, ...], int] = {
        (int(a), int(b)): size
        for (payload, a, b), size in sizes.items()
        if payload == TIED_GRADIENT and int(a) < int(b)
    }
    saved = _largest(((j,), size) for report in sized for j, size in report.saved)
    put_off = _largest(((j,), size) for report in sized for j, size in report.put_off)
    forward_s, recompute_s = all_seconds(FORWARD), all_seconds(RECOMPUTE)
    return Costs(
        forward_s=forward_s,
        backward_s=all_seconds(BACKWARD),
        recompute_s=recompute_s if any(recompute_s) else forward_s,
        input_gradient_s=all_seconds(INPUT_GRADIENT),
        weight_gradient_s=all_seconds(WEIGHT_GRADIENT),
        transfer_s=hops_s,
        input_bytes=sizes.get((ACTIVATION, -1, 0), 0),
        output_bytes=outputs,
        skip_bytes=skips,
        target_bytes=sizes.get((TARGET, 0, p - 1), 0),
        saved_bytes=tuple(saved.get((j,), 0) for j in range(p)),
        put_off_bytes=tuple(put_off.get((j,), 0) for j in range(p)),
        tied_bytes=tied_bytes,
        tied_s=_tied_s(tied_bytes, outputs, hops_s, routes.placement),
    )


def _largest(
    pairs: Iterable[tuple[Sequence[str | int], int]],
) -> Mapping[tuple[str | int, ...], int]:
    largest: dict[tuple[str | int, ...], int] = {}
    for key, size in pairs:
        largest[tuple(key)] = max(size, largest.get(tuple(key), 0))
    return largest


def _hops_s(steps: Sequence[Sequence[Report]], routes: Routes) -> list[float]:
    """Work out the seconds over each boundary; see the drawing above."""
    p = len(routes.placement)
    both_ways: list[list[float]] = [[] for _ in range(p - 1)]
    for reports in steps:
        above = {(j, i): s for report in reports for j, i, s, _ in report.gaps_s}
        below = {(j, i): s for report in reports for j, i, _, s in report.gaps_s}
        for (j, i), gap_s in above.items():
            if (j + 1, i) in below:
                both_ways[j].append(gap_s - below[j + 1, i])
    return [max(0.0, min(ways, default=0.0)) / 2 for ways in both_ways]


def _tied_s(
    tied_bytes: Mapping[tuple[int, ...], int],
    output_bytes: Sequence[int],
    hops_s: Sequence[float],
    placement: Sequence[int],
) -> dict[tuple[int, ...], float]:
    """Estimate the transfers of tied gradients from the largest message between two partitions.

    A larger one takes longer in proportion, and a smaller one as long. (They cannot be measured as
    the others are: they are taken at the end of the step, however early they arrive.)
    """
    hops = zip(output_bytes, hops_s, placement, placement[1:], strict=False)
    between = [(size, hop_s) for size, hop_s, here, there in hops if here != there]
    num_bytes = max((size for size, _ in between), default=0)
    hop_s = min((hop_s for size, hop_s in between if size == num_bytes), default=0.0)
    return {
        tie: hop_s * max(1.0, size / num_bytes if num_bytes else 0.0)
        for tie, size in tied_bytes.items()
    }
