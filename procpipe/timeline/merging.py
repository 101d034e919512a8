"""What the ranks recorded, each by its own clock, merged into one recording.

    rank 0   {"step": 7, "begin": 12000, "tasks": [["F", 0, 0, 12310, 104000], …], "sends": …}
    rank 1   {"step": 7, "begin": 88500, …}              │
                      └── less the clock's offset ──┐    │
    Step(7, tasks=(Ran(0, F0@0, 0.00000031, …), …), hops=(…))

A step counts only if every rank finished and reported it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from procpipe.plan.task import Task
from procpipe.timeline.clocks import ClockReading, drift_ppm, offset_at
from procpipe.timeline.recording import Clock, Hop, Ran, Recording, Step, Summed

#: What a rank records of a step; see ``Log.last_record`` and ``Recorder.last_record``.
Record = dict[str, Any]

#: A rank's clock readings: one or two; none for rank 0, whose clock the others are compared with.
Readings = Sequence[ClockReading]


def merged(
    records: Sequence[Sequence[Record]],
    readings: Sequence[Readings],
    *,
    plans: Mapping[str, str],
    facts: Mapping[str, Any],
    num_steps: int,
    is_closed: bool,
) -> Recording:
    """Merge each rank's records of the steps that are kept, given its clock's readings.

    The other arguments become fields of the recording.
    """
    by_step: defaultdict[int, list[Record]] = defaultdict(list)
    for of_rank in records:
        for record in of_rank:
            by_step[record["step"]].append(record)
    whole = [by_step[k] for k in sorted(by_step) if len(by_step[k]) == len(records)]
    zero_ns = min(_begins_ns(whole[0], readings)) if whole else 0
    num_replicas = int(facts.get("replicas", 1))
    return Recording(
        steps=tuple(merged_step(of_all, readings, zero_ns, num_replicas) for of_all in whole),
        num_steps=num_steps,
        plans=plans,
        facts=facts,
        clocks=tuple(_clock(rank, of_rank) for rank, of_rank in enumerate(readings)),
        layer_s=_layer_seconds(whole, facts.get("balance", ())),
        is_closed=is_closed,
    )


def merged_step(
    records: Sequence[Record],
    readings: Sequence[Readings],
    zero_ns: int | None = None,
    num_replicas: int = 1,
) -> Step:
    """Merge what all ranks recorded of one step.

    Args:
        records: by rank.
        readings: for each rank, its clock compared with rank 0's.
        zero_ns: what becomes 0, on rank 0's clock; by default the step's beginning.
        num_replicas: how many pipelines these ranks make.
    """
    begins_ns = _begins_ns(records, readings)
    zero_ns = min(begins_ns) if zero_ns is None else zero_ns
    begins = zip(records, begins_ns, strict=True)  # each on its own clock, and on rank 0's
    zeros_ns: list[int] = [zero_ns + record["begin"] - begin_ns for record, begin_ns in begins]

    def at_s(rank: int, at_ns: int) -> float:
        return (at_ns - zeros_ns[rank]) / 1e9

    first, num_stages = records[0], len(records) // num_replicas
    return Step(
        number=first["step"],
        call=first.get("call", ""),
        plan=first.get("plan", ""),
        shares=tuple(tuple(record.get("sizes", ())) for record in records[::num_stages]),
        begins_s=tuple(at_s(rank, record["begin"]) for rank, record in enumerate(records)),
        ends_s=tuple(at_s(rank, record["end"]) for rank, record in enumerate(records)),
        tasks=tuple(
            Ran(rank, Task(kind, i, j), at_s(rank, start_ns), at_s(rank, end_ns))
            for rank, record in enumerate(records)
            for kind, i, j, start_ns, end_ns in record["tasks"]
        ),
        hops=tuple(_hops(records, at_s, num_stages)),
        sums=tuple(
            Summed(rank, what, num_bytes, *(at_s(rank, at_ns) for at_ns in times_ns))
            for rank, record in enumerate(records)
            for what, num_bytes, *times_ns in record.get("sums", ())
        ),
    )


def _begins_ns(records: Sequence[Record], readings: Sequence[Readings]) -> list[int]:
    """Return when each rank began a step, on rank 0's clock."""
    return [
        record["begin"] - (offset_at(of_rank, record["begin"]) if of_rank else 0)
        for record, of_rank in zip(records, readings, strict=True)
    ]


def _hops(
    records: Sequence[Record], at_s: Callable[[int, int], float], num_stages: int
) -> list[Hop]:
    """Match both ends of each message: within a replica they are of the same ``Transfer``."""
    taken: defaultdict[tuple[Any, ...], list[tuple[int, float, float]]] = defaultdict(list)
    for rank, record in enumerate(records):
        for *key, _, start_ns, end_ns in record.get("takes", ()):
            times_s = at_s(rank, start_ns), at_s(rank, end_ns)
            taken[rank // num_stages, *key].append((rank, *times_s))
    hops = []
    for rank, record in enumerate(records):
        for *key, size_bytes, start_ns, end_ns in record.get("sends", ()):
            ends = taken[rank // num_stages, *key]
            if not ends:
                continue
            destination, *taken_s = ends.pop(0)
            posted_s = at_s(rank, start_ns), at_s(rank, end_ns)
            kind, i, *_ = key
            hops.append(Hop(kind, i, rank, destination, size_bytes, *posted_s, *taken_s))
    return sorted(hops, key=lambda hop: hop.posted_s)


def _clock(rank: int, readings: Readings) -> Clock:
    if not readings:
        return Clock(rank, 0.0, 0.0, 0.0)
    last = readings[-1]
    error_ns = max(reading.error_ns for reading in readings)
    return Clock(rank, last.offset_ns / 1e9, error_ns / 1e9, drift_ppm(readings))


def _layer_seconds(steps: Sequence[Sequence[Record]], balance: Sequence[int]) -> tuple[float, ...]:
    """Return each layer's mean forward seconds; the loss counts with the last layer.

    Nothing if a layer was not timed.
    """
    sums: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for record in (record for of_all in steps for record in of_all):
        for j, index, took_ns, count in record.get("layers", ()):
            sums[j, index][0] += took_ns
            sums[j, index][1] += count
    seconds: list[float] = []
    starts = [0, *accumulate(balance)]
    for j, num_layers in enumerate(balance):
        for index in range(num_layers):
            took_ns, count = sums[j, index]
            if not count:
                return ()
            seconds.append(took_ns / count / 1e9)
        took_ns, count = sums[j, num_layers]
        if count and starts[j + 1] > starts[j]:
            seconds[-1] += took_ns / count / 1e9
    return tuple(seconds)
