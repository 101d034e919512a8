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

from collections import defaultdict
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

#: Besides the payloads of messages, what has bytes: what autograd keeps inside the layers of a
#: partition, and what is kept between the halves of a backward.
SAVED, PUT_OFF = "saved", "put off"


#: A task's kind, micro-batch, partition, and from when to when it ran.
_TimedTask = tuple[str, int, int, float, float]


@dataclass
class Report:
    """What one rank reports of a step."""

    step_s: float = 0.0  # seconds of the step
    #: The tasks, in seconds of the rank's own clock.
    tasks: list[_TimedTask] = field(default_factory=list)
    #: The bytes of messages: payload, source, destination; for those of a partition, twice that.
    sizes: list[tuple[str, int, int, int]] = field(default_factory=list)


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
    timed = [  # of each replica of each step
        (first, list(chain(*(report.tasks for report in reports[first : first + n]))))
        for reports in of_seconds
        for first in range(0, len(reports), n)
    ]
    sizes: defaultdict[tuple[str, int, int], int] = defaultdict(int)  # of the largest message
    for report in chain(*of_bytes):
        for payload, a, b, size in report.sizes:
            sizes[payload, a, b] = max(size, sizes[payload, a, b])
    skips = {(a, b): sizes[SKIP, a, b] for a, b in routes.skips}
    task_s = _task_s(timed)

    def all_seconds(kind: str) -> tuple[float, ...]:
        return tuple(task_s.get((kind, j), 0.0) for j in range(p))

    def output_bytes(j: int) -> int:
        stashed = sum(skips[a, b] for a, b in routes.skips if a == j)
        return max(sizes[ROOTS, j, j] - stashed, sizes[ACTIVATION, j, j + 1])

    outputs = tuple(map(output_bytes, range(p)))
    hops_s = tuple(_hops_s([tasks for _, tasks in timed], p))
    tied_bytes: dict[tuple[int, ...], int] = {
        (a, b): size
        for (payload, a, b), size in sizes.items()
        if payload == TIED_GRADIENT and a < b
    }
    forward_s, recompute_s = all_seconds(FORWARD), all_seconds(RECOMPUTE)
    return Costs(
        forward_s=forward_s,
        backward_s=all_seconds(BACKWARD),
        recompute_s=recompute_s if any(recompute_s) else forward_s,
        input_gradient_s=all_seconds(INPUT_GRADIENT),
        weight_gradient_s=all_seconds(WEIGHT_GRADIENT),
        transfer_s=hops_s,
        input_bytes=sizes[ACTIVATION, -1, 0],
        output_bytes=outputs,
        skip_bytes=skips,
        target_bytes=sizes[TARGET, 0, p - 1],
        saved_bytes=tuple(sizes[SAVED, j, j] for j in range(p)),
        put_off_bytes=tuple(sizes[PUT_OFF, j, j] for j in range(p)),
        tied_bytes=tied_bytes,
        tied_s=_tied_s(tied_bytes, outputs, hops_s, routes.placement),
    )


def _task_s(timed: Iterable[tuple[int, Sequence[_TimedTask]]]) -> dict[tuple[str, int], float]:
    """Return the median seconds of each kind of task in each partition, on the slowest replica."""
    # By kind and partition, then by the replica, the medians of steps.
    seconds: defaultdict[tuple[str, int], defaultdict[int, list[float]]]
    seconds = defaultdict(lambda: defaultdict(list))
    for replica, tasks in timed:
        of_step: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for kind, _, j, start_s, end_s in tasks:
            of_step[kind, j].append(end_s - start_s)
        for key, of_tasks_s in of_step.items():
            seconds[key][replica].append(median(of_tasks_s))
    return {key: max(map(median, of_all.values())) for key, of_all in seconds.items()}


def _hops_s(steps: Iterable[Iterable[_TimedTask]], p: int) -> list[float]:
    """Work out the seconds over each boundary; see the drawing above."""
    both_ways: list[list[float]] = [[] for _ in range(p - 1)]
    for tasks in steps:
        times = {Task(kind, i, j): (start_s, end_s) for kind, i, j, start_s, end_s in tasks}
        above, below = {}, {}
        for task, (start_s, end_s) in times.items():
            if task.makes_gradient:
                forward_start_s, forward_end_s = times[Task(FORWARD, task.i, task.j)]
                above[task.j, task.i] = start_s - forward_end_s
                below[task.j, task.i] = end_s - forward_start_s
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
