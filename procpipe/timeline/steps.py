"""The measured tasks and messages of a run's steps, merged from what its ranks recorded.

    rank 0   {"step": 7, "begin": 12000, "tasks": [["F", 0, 0, 12310, 104000], …], "sends": …}
    rank 1   {"step": 7, "begin": 12500, …}       nanoseconds of each process's monotonic clock
                 ↓ plus the offset of its host to wall time, one number for the whole run
    stage 0   [F0][F1]  ·····wait·····  [──B1──][──B0──]      a row of tasks a rank
                  └─ hop ─┐    ┌─ hop ─┘                      Hop: a message, at both its ends
    stage 1   ··wait··  [F0][F1][──B1──][──B0──]
                                          └ sum ─────         Summed: with other replicas

Clocks of different hosts are compared by nothing but their wall time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task

#: What a rank records of a step; see ``Log.last_record`` and ``Recorder.last_record``.
Record = dict[str, Any]


@dataclass(frozen=True)
class TimedTask:
    """One task of a step; times in seconds since the step began."""

    task: Task
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


class Clock(NamedTuple):
    """How a process's monotonic times become wall times."""

    host: str  # equal for processes with the same monotonic clock
    offset_ns: int  # wall time less monotonic time

    @classmethod
    def here(cls) -> Clock:
        """Return that of this process, with the present offset."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return cls(boot, time.time_ns() - time.perf_counter_ns())


def common_offsets(clocks: Sequence[Clock]) -> list[int]:
    """Return an offset for each rank: that of the first rank on its host.

    Wall time may be set between two ranks' starts; their monotonic clock is the same.
    """
    first: dict[str, int] = {}
    return [first.setdefault(clock.host, clock.offset_ns) for clock in clocks]


@dataclass(frozen=True)
class Trace:
    """What one rank recorded of a run: the contents of its file."""

    name: str  # of the file
    rank: int
    run: int  # equal on all ranks of a run
    clock: Clock
    #: The arguments of the ``Stage``: "balance", "chunks", "checkpoint", "schedule", "layers", …
    facts: Mapping[str, Any]
    records: Sequence[Record]  # in order; those in the middle of a long run are left out
    is_closed: bool  # whether the run closed this stage, and did not fail


@dataclass(frozen=True)
class Hop:
    """A message from one rank to another."""

    transfer: Transfer  # what it carried, between which partitions
    source: int  # the rank that sent it
    destination: int  # the rank that received it
    num_bytes: int  # of its tensors
    posted_s: float  # when the sender began to send it
    sent_s: float  # when the sender continued
    asked_s: float  # when the receiver began to wait for it
    taken_s: float  # when the receiver had it


@dataclass(frozen=True)
class Summed:
    """A sum over all replicas, of gradients or losses, as one rank took part in it."""

    what: str  # "gradients 0" for the first bucket, "loss", …
    num_bytes: int  # of its tensor
    start_s: float  # when the rank began it
    asked_s: float  # when the rank began to wait for it
    taken_s: float  # when the rank had it


@dataclass(frozen=True)
class Step:
    """One run of a plan on all stages, of all replicas if there are several.

    Times are seconds since the first rank began the step. A rank is the index of a stage, plus that
    of its replica times the number of stages.
    """

    number: int  # counted from 0 over all runs of a plan, including evaluation
    call: str  # the method that ran it: "step", "forward" or "backward"
    plan: str  # the digest of its plan; of replica 0, if there are several
    shares: tuple[tuple[int, ...], ...]  # by replica, the samples of each of its micro-batches
    seconds: float  # until the last rank ended it
    rows: tuple[tuple[TimedTask, ...], ...]  # by rank, what ran, in order
    hops: tuple[Hop, ...] = ()  # the messages, in the order in which they were sent
    sums: tuple[tuple[Summed, ...], ...] = ()  # by rank, in the order of the waits for them

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.shares)

    @property
    def num_stages(self) -> int:
        """The number of stages of a replica."""
        return len(self.rows) // self.num_replicas

    @property
    def trains(self) -> bool:
        """Whether it has backward tasks."""
        return any(timed.task.kind in "BIW" for row in self.rows for timed in row)

    def replica(self, replica: int) -> tuple[tuple[TimedTask, ...], ...]:
        """List the rows of a replica."""
        first = replica * self.num_stages
        return self.rows[first : first + self.num_stages]


@dataclass(frozen=True)
class Recording:
    """The steps of a run that every rank recorded."""

    steps: tuple[Step, ...]  # in order; those in the middle of a long run are left out
    num_steps: int  # how many steps there were
    facts: Mapping[str, Any]  # see ``Trace``
    is_closed: bool = True  # whether the run closed its stages, and did not fail

    def step(self, number: int | None = None) -> Step:
        """Return a step by its number; by default the last that trained, else the last.

        Raises:
            ValueError: it was not recorded; names the recorded steps.
        """
        if not self.steps:
            raise ValueError("no step ended on all stages")
        if number is None:
            return next((step for step in reversed(self.steps) if step.trains), self.steps[-1])
        for step in self.steps:
            if step.number == number:
                return step
        raise ValueError(f"step {number} was not recorded, but {self.kept_text()}")

    def like(self, step: Step) -> list[Step]:
        """Return the steps with the same work; without the first of a run if there are others."""
        work = step.plan, step.call, step.shares
        same = [other for other in self.steps if (other.plan, other.call, other.shares) == work]
        return same[1:] if len(same) > 1 and same[0].number == 0 else same

    def kept_text(self) -> str:
        """Describe which steps were recorded: "steps 0-4,20-119 of 120"."""
        return f"steps {ranges_text(step.number for step in self.steps)} of {self.num_steps}"


def ranges_text(numbers: Iterable[int]) -> str:
    """Write numbers as the kernel writes CPUs: 0, 1, 2 and 8 are "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def merged(of_ranks: Iterable[Trace]) -> Recording:
    """Merge what the ranks of a run recorded; a step counts if every rank recorded it.

    Raises:
        ValueError: these are not the files of all ranks of one run.
    """
    traces = sorted(of_ranks, key=lambda trace: trace.rank)
    facts, ranks = traces[0].facts, [trace.rank for trace in traces]
    if len({trace.run for trace in traces}) > 1:
        raise ValueError(
            f"{', '.join(trace.name for trace in traces)} are of different runs, or of different "
            "pipelines: give the files of all ranks of one"
        )
    if ranks != [*range(facts["the number of processes"])]:
        raise ValueError(
            f"these are the files of ranks {', '.join(map(str, ranks))}: give those of all "
            f"{facts['the number of processes']} ranks, each once"
        )
    by_step: defaultdict[int, list[Record]] = defaultdict(list)
    for trace in traces:
        for record in trace.records:
            by_step[record["step"]].append(record)
    whole = [by_step[k] for k in sorted(by_step) if len(by_step[k]) == len(traces)]
    offsets_ns = common_offsets([trace.clock for trace in traces])
    return Recording(
        steps=tuple(merged_step(of_all, offsets_ns, facts["replicas"]) for of_all in whole),
        num_steps=max(by_step, default=-1) + 1,
        facts=facts,
        is_closed=all(trace.is_closed for trace in traces),
    )


def merged_step(records: Sequence[Record], offsets_ns: Sequence[int], num_replicas: int) -> Step:
    """Merge what all ranks recorded of one step.

    Args:
        records: by rank.
        offsets_ns: of each rank, wall time less the times in its record.
        num_replicas: how many pipelines these ranks make.
    """
    pairs = [*zip(records, offsets_ns, strict=True)]
    begin_ns = min(record["begin"] + offset_ns for record, offset_ns in pairs)
    end_ns = max(record["end"] + offset_ns for record, offset_ns in pairs)
    #: The beginning of the step by the clock of each rank.
    zeros_ns = [begin_ns - offset_ns for offset_ns in offsets_ns]

    def seconds(rank: int, *times_ns: int) -> list[float]:
        return [(at_ns - zeros_ns[rank]) / 1e9 for at_ns in times_ns]

    first, num_stages = records[0], len(records) // num_replicas
    return Step(
        number=first["step"],
        call=first.get("call", ""),
        plan=first.get("plan", ""),
        shares=tuple(tuple(record.get("sizes", ())) for record in records[::num_stages]),
        seconds=(end_ns - begin_ns) / 1e9,
        rows=tuple(
            tuple(TimedTask(Task(k, i, j), *seconds(rank, *ns)) for k, i, j, *ns in record["tasks"])
            for rank, record in enumerate(records)
        ),
        hops=tuple(sorted(_hops(records, seconds, num_stages), key=lambda hop: hop.posted_s)),
        sums=tuple(
            tuple(Summed(what, size, *seconds(rank, *ns)) for what, size, *ns in record["sums"])
            for rank, record in enumerate(records)
        ),
    )


def _hops(
    records: Sequence[Record], seconds: Callable[..., list[float]], num_stages: int
) -> Iterator[Hop]:
    """Match both ends of each message: within a replica they are of the same ``Transfer``."""
    taken: defaultdict[tuple[Any, ...], list[tuple[int, list[float]]]] = defaultdict(list)
    for rank, record in enumerate(records):
        for *key, _, asked_ns, taken_ns in record.get("takes", ()):
            taken[rank // num_stages, *key].append((rank, seconds(rank, asked_ns, taken_ns)))
    for rank, record in enumerate(records):
        for *key, size, posted_ns, sent_ns in record.get("sends", ()):
            if ends := taken[rank // num_stages, *key]:
                to, times_s = ends.pop(0)
                posted_s = seconds(rank, posted_ns, sent_ns)
                yield Hop(Transfer(*key), rank, to, size, *posted_s, *times_s)


def early_hops_s(steps: Sequence[Step]) -> dict[tuple[int, int], float]:
    """Return by how much messages arrive before they are sent, at most, by their two ranks.

    It is empty if none does. Else the clocks of the two ranks' hosts differ by this at least.
    """
    found: defaultdict[tuple[int, int], float] = defaultdict(float)
    for hop in (hop for step in steps for hop in step.hops if hop.taken_s < hop.posted_s):
        ranks = hop.source, hop.destination
        found[ranks] = max(found[ranks], hop.posted_s - hop.taken_s)
    return found
