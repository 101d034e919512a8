"""Recorded steps, made of literal numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.timeline.steps import Clock, Hop, Recording, Step, Summed, TimedTask, Trace

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
    (Summed("gradients 0", 4000, start_s=9.5, asked_s=10, taken_s=12.5),),
    (Summed("gradients 0", 1000, start_s=7, asked_s=7.5, taken_s=9),),
    (Summed("gradients 0", 4000, start_s=11, asked_s=11, taken_s=12.25),),
    (Summed("gradients 0", 1000, start_s=8, asked_s=8.5, taken_s=9),),
)

FACTS = {
    "balance": [2, 3],
    "placement": [0, 1],
    "checkpoint": "never",
    "schedule": "gpipe",
    "replicas": 1,
    "the number of processes": 2,
}


def replicas_step(**fields: Any) -> Step:
    """Return a step of two replicas of two stages."""
    values: dict[str, Any] = {"shares": ((8, 8), (8, 7)), "sums": SUMS, "seconds": 12.5}
    return read_step(REPLICAS, **(values | fields))


def read_step(drawing: str, *, number: int = 7, **fields: Any) -> Step:
    """Read a step from a row of tasks and times a rank; stages and partitions are the same."""
    lines = [line.split() for line in drawing.strip().splitlines()]
    num_stages = len(lines) // len(fields.get("shares", ("one",)))
    rows = []
    for rank, words in enumerate(lines):
        row = []
        for name, span in zip(words[::2], words[1::2], strict=True):
            start, end = map(float, span.split("-"))
            row.append(TimedTask(Task.parse(f"{name}@{rank % num_stages}"), start, end))
        rows.append(tuple(row))
    values: dict[str, Any] = {
        "call": "step",
        "plan": "abc",
        "shares": ((8, 8),),
        "seconds": max(one.end_s for row in rows for one in row),
    }
    return Step(number, rows=tuple(rows), **(values | fields))


def recording_of(*steps: Step, **fields: Any) -> Recording:
    """Make a recording of steps."""
    return Recording(steps, fields.pop("num_steps", 8), FACTS | fields.pop("facts", {}), **fields)


#: The host of rank 1 has another monotonic clock, 100 s ahead, and the same wall time.
CLOCKS = (Clock("here", 5000 * 10**9), Clock("there", 4900 * 10**9))


def records_of(step: int = 0, start_s: int = 10) -> list[dict[str, Any]]:
    """Return what two ranks record of one micro-batch forward; rank 1 has two partitions."""
    s = 10**9
    k, h = start_s, start_s + 101  # when each begins, by its own clock
    return [
        {
            "step": step, "call": "step", "plan": "abc", "sizes": [4],
            "begin": k * s, "end": (k + 8) * s,
            "tasks": [["F", 0, 0, k * s, (k + 2) * s]],
            "sends": [
                ["activation", 0, 0, 1, 64, (k + 2) * s, (k + 2) * s],
                ["target", 0, 0, 2, 8, (k + 2) * s, (k + 3) * s],
            ],
            "takes": [["loss", 0, 1, 0, 4, (k + 3) * s, (k + 8) * s]],
            "sums": [],
        },
        {
            "step": step, "call": "step", "plan": "abc", "sizes": [4],
            "begin": h * s, "end": (h + 7) * s,
            "tasks": [["F", 0, 1, (h + 2) * s, (h + 4) * s], ["F", 0, 2, (h + 4) * s, (h + 6) * s]],
            "sends": [["loss", 0, 1, 0, 4, (h + 6) * s, (h + 6) * s]],
            "takes": [
                ["activation", 0, 0, 1, 64, h * s, (h + 2) * s],
                ["target", 0, 0, 2, 8, (h + 2) * s, (h + 2) * s],
            ],
            "sums": [],
        },
    ]  # fmt: skip


def traces_of(*records: Sequence[dict[str, Any]], **fields: Any) -> list[Trace]:
    """Return what the ranks recorded, given the records of each."""
    facts = FACTS | {"balance": [2, 1, 1], "placement": [0, 1, 1]}
    values: dict[str, Any] = {"run": 1, "facts": facts, "is_closed": True}
    return [
        Trace(f"run.{rank}.json", rank, clock=CLOCKS[rank], records=of_rank, **(values | fields))
        for rank, of_rank in enumerate(records)
    ]


def hop(payload: str, i: int, source: int, destination: int, *times_s: float) -> Hop:
    """Return a message between two stages."""
    return Hop(Transfer(payload, i, source, destination), source, destination, 64, *times_s)
