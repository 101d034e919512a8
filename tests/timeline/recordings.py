"""Recorded steps, made of literal numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procpipe.plan.task import Task
from procpipe.timeline.recording import Clock, Hop, Ran, Recording, Step, Summed

#: Equal stages, a forward of 1 s and a backward of 2 s; each message takes 0.5 s.
EQUAL = """
    F0 0-1 F1 1-2                        B1 6-8 B0 8-10
    F0 1.5-2.5 F1 2.5-3.5 B1 3.5-5.5 B0 5.5-7.5
"""

#: The second stage takes twice as long; messages take no time.
UNEQUAL = """
    F0 0-1 F1 1-2             B1 9-11 B0 13-15
    F0 1-3 F1 3-5 B1 5-9 B0 9-13
"""


#: Two replicas of these equal stages; the second one is a second late.
REPLICAS = f"""{EQUAL.rstrip()}
    F0 1-2 F1 2-3                        B1 7-9 B0 9-11
    F0 2.5-3.5 F1 3.5-4.5 B1 4.5-6.5 B0 6.5-8.5
"""

#: Their sums: those of stage 1 end beside tasks, those of stage 0 1.5 s after the last task.
SUMS = (
    Summed(0, "gradients 0", 4000, start_s=9.5, end_s=12.5, asked_s=10, taken_s=12.5),
    Summed(1, "gradients 0", 1000, start_s=7, end_s=9, asked_s=7.5, taken_s=9),
    Summed(2, "gradients 0", 4000, start_s=11, end_s=12.25, asked_s=11, taken_s=12.25),
    Summed(3, "gradients 0", 1000, start_s=8, end_s=9, asked_s=8.5, taken_s=9),
)


def replicas_step(**fields: Any) -> Step:
    """Return a step of two replicas of two stages."""
    values: dict[str, Any] = {"shares": ((8, 8), (8, 7)), "sums": SUMS, "ends_s": (12.5,) * 4}
    return read_step(REPLICAS, **(values | fields))


def read_step(drawing: str, *, number: int = 7, hops: Sequence[Hop] = (), **fields: Any) -> Step:
    """Read a step from a row of tasks and times a rank; stages and partitions are the same."""
    rows = [line.split() for line in drawing.strip().splitlines()]
    num_stages = len(rows) // len(fields.get("shares", ("one",)))
    tasks = []
    for stage, words in enumerate(rows):
        for name, span in zip(words[::2], words[1::2], strict=True):
            start, end = span.split("-")
            partition = fields.get("partition_of", {}).get((stage, name), stage % num_stages)
            tasks.append(Ran(stage, Task.parse(f"{name}@{partition}"), float(start), float(end)))
    fields.pop("partition_of", None)
    ends = tuple(max(ran.end_s for ran in tasks if ran.rank == j) for j in range(len(rows)))
    values: dict[str, Any] = {
        "number": number,
        "call": "step",
        "plan": "abc",
        "shares": ((8, 8),),
        "begins_s": (0.0,) * len(rows),
        "ends_s": ends,
        "tasks": tuple(tasks),
        "hops": tuple(hops),
    }
    return Step(**(values | fields))


def recording_of(*steps: Step, **fields: Any) -> Recording:
    """Make a recording of steps."""
    facts = {"balance": [2, 3], "chunks": 2, "checkpoint": "never", "schedule": "gpipe"}
    values: dict[str, Any] = {
        "steps": steps,
        "num_steps": 8,
        "plans": {"abc": "plan m=2 n=2\n"},
        "facts": facts,
        "clocks": (Clock(0, 0.0, 0.0, 0.0), Clock(1, 0.5, 2e-6, 0.25)),
    }
    fields["facts"] = facts | fields.get("facts", {})
    return Recording(**(values | fields))


def replicas_recording(*steps: Step) -> Recording:
    """Make a recording of two replicas."""
    clocks = tuple(Clock(rank, 0.0, 0.0, 0.0) for rank in range(4))
    return recording_of(*(steps or (replicas_step(),)), facts={"replicas": 2}, clocks=clocks)
