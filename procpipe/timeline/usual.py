"""What a recorded run usually took for a step: the numbers to replay it with another plan.

    files of all ranks ──read, merged──▶ Recording ──usual──▶ Usual ──▶ ``procpipe plan --costs``

Medians are over the training steps that did the same work as the last one, of all replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Any

from procpipe.plan.routes import Channel
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import Plan
from procpipe.timeline.split import usual_seconds
from procpipe.timeline.steps import Hop, Recording, Step


@dataclass(frozen=True)
class Usual:
    """The usual step of a recorded run.

    Channels are ``(payload, source, destination)`` as in ``plan.routes``, between partitions.
    """

    plan: Plan  # of replica 0: the tasks of each stage in the order in which they ran
    samples: tuple[int, ...]  # of each micro-batch of replica 0
    #: The arguments of the ``Stage``: "balance", "placement", "schedule", "checkpoint", "replicas",
    #: "layers" (a line each), "the type of devices", …
    facts: Mapping[str, Any]
    num_steps: int  # how many steps the medians are of
    step_s: float  # seconds of a step
    task_s: Mapping[tuple[str, int], float]  # of a task, by its kind and partition
    #: Of the forward of each layer, for one micro-batch; the loss counts with the last. Empty if
    #: layers were not timed, as on GPUs.
    layer_s: tuple[float, ...]
    host_s: float  # between two tasks of a stage, less those in waits and sends
    send_s: Mapping[Channel, float]  # for which sending a message occupies its stage
    #: From the beginning of a send until a receiver that waits for it has it. A channel whose
    #: receiver never waited is left out.
    hop_s: Mapping[Channel, float]
    message_bytes: Mapping[Channel, int]  # of the largest message


def usual(recording: Recording) -> Usual:
    """Find the usual training step of a recording.

    Raises:
        KeyError: no step ended on all stages.
        ValueError: no step trained, or forward and backward ran as two plans.
    """
    last = recording.step()
    if last.call != "step" or not last.trains:
        raise ValueError("there is no training step of stage.step() in it")
    steps = recording.like(last)
    hops: defaultdict[Channel, list[Hop]] = defaultdict(list)
    for hop in (hop for step in steps for hop in step.hops):
        hops[hop.transfer.channel].append(hop)
    waited_s = {
        channel: [hop.taken_s - hop.posted_s for hop in of if hop.asked_s <= hop.posted_s]
        for channel, of in hops.items()
    }
    rows = [[one.task for one in row] for row in last.replica(0)]
    placement = tuple(recording.facts["placement"])
    return Usual(
        plan=plan_of_rows(len(last.shares[0]), rows, placement),
        samples=last.shares[0],
        facts=recording.facts,
        num_steps=len(steps),
        step_s=median(step.seconds for step in steps),
        task_s=usual_seconds(steps),
        layer_s=recording.layer_s,
        host_s=median(chain.from_iterable(map(_pauses_s, steps))),
        send_s={c: median(hop.sent_s - hop.posted_s for hop in of) for c, of in hops.items()},
        hop_s={channel: median(times_s) for channel, times_s in waited_s.items() if times_s},
        message_bytes={c: max(hop.num_bytes for hop in of) for c, of in hops.items()},
    )


def _pauses_s(step: Step) -> Iterator[float]:
    """Yield the seconds of each stage between two tasks, less those in waits and sends."""
    for rank, row in enumerate(step.rows):
        spans = [(one.start_s, one.end_s, True) for one in row]
        for hop in step.hops:
            spans += [(hop.posted_s, hop.sent_s, False)] * (hop.source == rank)
            spans += [(hop.asked_s, hop.taken_s, False)] * (hop.destination == rank)
        pause_s = 0.0
        for (_, end_s, _), (start_s, _, is_task) in pairwise(sorted(spans)):
            pause_s += start_s - end_s
            if is_task:
                yield pause_s
                pause_s = 0.0
