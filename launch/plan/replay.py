"""Fills the table of layers, and the machine's numbers, from recorded runs.

    Recording ──usual──▶ Usual ──▶ Table and Machine

What is usual are medians over the training steps that did the same work as the last one, of all
replicas. Of several runs, the first one's machine counts; each says what micro-batches of its size
take.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from procpipe.plan.routes import ACTIVATION, SKIP, Channel
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import Plan
from procpipe.planner.costs import Layer, Machine, Skip, Table, task_seconds
from procpipe.planner.simulation import simulate
from procpipe.timeline.split import last_end_s, usual_seconds
from procpipe.timeline.steps import Hop, Recording, Trace, merged
from procpipe.words import counted

#: A layer as a recording describes it, see ``layer_facts``: its name, and how many parameters.
_LAYER = re.compile(r"(.*?): .*, ([\d,]+) parameters")


@dataclass(frozen=True)
class Usual:
    """The usual step of a recorded run."""

    plan: Plan  # of replica 0: the tasks of each stage in the order in which they ran
    samples: tuple[int, ...]  # of each micro-batch of replica 0
    #: The arguments of the ``Stage``: "balance", "placement", "schedule", "checkpoint", "replicas",
    #: "layers" (a line each), "the type of devices", …
    facts: Mapping[str, Any]
    num_steps: int  # how many steps the medians are of
    step_s: float  # seconds of a step
    task_s: Mapping[tuple[str, int], float]  # of a task, by its kind and partition
    machine: Machine  # what messages take, and the ends of a step
    message_bytes: Mapping[Channel, int]  # of the largest message between two partitions
    needed_bytes: int = 0  # of the stage that needs most, where a proposal was run

    @property
    def idle(self) -> float:
        """The share of a step that stages are idle, the mean over all."""
        busy_s = sum(self.task_s[kind, j] for kind, _, j in self.plan.tasks())
        return max(0.0, 1 - busy_s / (self.plan.num_stages * self.step_s))


def usual(recording: Recording) -> Usual:
    """Find the usual training step of a recording.

    Raises:
        ValueError: no step ended on all stages, or the last one did not train, or had two plans.
    """
    last = recording.step()
    if last.call != "step" or not last.trains:
        raise ValueError("there is no training step of stage.step() in it")
    steps = recording.like(last)
    rows = [[one.task for one in row] for row in last.replica(0)]
    hops: defaultdict[Channel, list[Hop]] = defaultdict(list)
    for hop in (hop for step in steps for hop in step.hops):
        hops[hop.transfer.channel].append(hop)
    message_bytes = {channel: max(hop.num_bytes for hop in of) for channel, of in hops.items()}
    sends_s = {
        channel: median(hop.sent_s - hop.posted_s for hop in of) for channel, of in hops.items()
    }
    # From the end of a send until a receiver that has waited for it has it.
    hops_s = [
        median(waited_s) - sends_s[channel]
        for channel, of in hops.items()
        if (waited_s := [hop.taken_s - hop.posted_s for hop in of if hop.asked_s <= hop.posted_s])
    ]
    # Before the first task of a step and after its last one.
    ends_s = [
        step.seconds - last_end_s(step.rows) + min(one.start_s for row in step.rows for one in row)
        for step in steps
    ]
    num_bytes = sum(message_bytes.values())
    machine = Machine(
        send_s=sum(sends_s.values()) / num_bytes if num_bytes else 0.0,
        hop_s=max(0.0, median(hops_s)) if hops_s else 0.0,
        step_s=median(ends_s),
    )
    return Usual(
        plan=plan_of_rows(len(last.shares[0]), rows, tuple(recording.facts["placement"])),
        samples=last.shares[0],
        facts=recording.facts,
        num_steps=len(steps),
        step_s=median(step.seconds for step in steps),
        task_s=usual_seconds(steps),
        machine=machine,
        message_bytes=message_bytes,
    )


def usual_of_runs(traces: Iterable[Trace]) -> list[Usual]:
    """Find the usual training steps of one or more runs of the same pipeline.

    Raises:
        ValueError: as ``merged`` and ``usual``, or the runs do not fit together.
    """
    by_run: defaultdict[int, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_run[trace.run].append(trace)
    runs = [usual(merged(of_ranks)) for of_ranks in by_run.values()]
    for name in ("layers", "balance", "placement", "replicas"):
        if any(run.facts[name] != runs[0].facts[name] for run in runs):
            raise ValueError(f"the runs differ in their {name}: give runs that are equal in these")
    return runs


def basis(runs: Sequence[Usual]) -> str:
    """Say what is known of runs, and what is not."""
    recorded = [
        f"a recorded run: {run.facts['schedule']}, balance {run.facts['balance']}, "
        f"{counted(len(run.samples), 'micro-batch')} of {max(run.samples)} samples, medians of "
        f"{counted(run.num_steps, 'step')}\n"
        for run in runs
    ]
    others = "on a line through those of these runs"
    if len({max(run.samples) for run in runs}) == 1:
        others = "in proportion, so small ones are underestimated (add a run with other chunks)"
    return (
        f"{''.join(recorded)}a partition's seconds are divided among its layers by their "
        f"parameters\nseconds of micro-batches of other sizes are {others}\nnot recorded, so not "
        "counted: parameters, and what autograd keeps"
    )


def table_of(runs: Sequence[Usual], samples: int) -> Table:
    """Return the costs of a pipeline's layers, on a micro-batch of so many samples.

    Of their bytes, only those of messages are known, in proportion. A partition's seconds are
    divided among its layers by the numbers of their parameters. Outputs within a partition are
    taken to be as large as the messages.
    """
    run = runs[0]
    balance, factor = list(run.facts["balance"]), samples / max(run.samples)
    named = [_LAYER.fullmatch(line) for line in run.facts["layers"]]
    counts = {match[1]: int(match[2].replace(",", "")) for match in named if match}
    sizes = {channel: math.ceil(size * factor) for channel, size in run.message_bytes.items()}
    cuts = [sum(balance[: j + 1]) - 1 for j in range(len(balance))]
    known = {cut: sizes.get((ACTIVATION, j, j + 1), 0) for j, cut in enumerate(cuts[:-1])}
    mean = round(fmean(known.values())) if known else 0
    layers = tuple(
        Layer(name, task_seconds(1 + count, 2 * (1 + count)), output_bytes=known.get(k, mean))
        for k, (name, count) in enumerate(counts.items())
    )
    skips = tuple(
        Skip(cuts[a], (cuts[b],), num_bytes)
        for (payload, a, b), num_bytes in sizes.items()
        if payload == SKIP
    )
    by_size: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for one in reversed(runs):
        for task, seconds in one.task_s.items():
            by_size[task][max(one.samples)] = seconds
    task_s = {task: _seconds_at(samples, known_s) for task, known_s in by_size.items()}
    return Table(samples, layers, skips=skips).timed(balance, task_s)


def _seconds_at(samples: int, known_s: Mapping[int, float]) -> float:
    """Return the seconds of a task, on the line through those of the two sizes around it.

    Or through the nearest two; below the smallest at least in proportion, as with one size, and
    above the largest at least as long as the faster of them.
    """
    points = sorted(known_s.items()) if len(known_s) > 1 else [(0, 0.0), *known_s.items()]
    place = bisect_left(points, (samples, 0.0), 1, len(points) - 1)
    (low, low_s), (high, high_s) = points[place - 1 : place + 1]
    least_s = low_s * samples / low if samples < low else min(low_s, high_s)
    return max(least_s, low_s + (high_s - low_s) * (samples - low) / (high - low))


def machine_of(run: Usual, table: Table) -> Machine:
    """Return what a run says of its machine, such that a replay of the run takes as long as it did.

    What a replay lacks is added to the host's seconds for each task: also the rare long pauses of
    processes that share a host, of which there are the more, the more tasks there are.
    """

    def with_more(microseconds: int) -> Machine:
        return replace(run.machine, host_s=run.machine.host_s + microseconds / 1e6)

    def total_s(microseconds: int) -> float:
        costs = table.costs(run.facts["balance"], with_more(microseconds))
        return simulate(run.plan, costs).total_s

    return with_more(bisect_left(range(math.ceil(run.step_s * 1e6)), run.step_s, key=total_s))
