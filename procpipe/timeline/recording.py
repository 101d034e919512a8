"""A recording: the measured tasks and messages of some steps of a run, on all stages.

    stage 0   [F0][F1]  ·····wait·····  [──B1──][──B0──]      Ran: a task, when and where
                  └─ hop ─┐    ┌─ hop ─┘
    stage 1   ··wait··  [F0][F1][──B1──][──B0──]              Hop: a message, at both its ends
                                          └ sum ─────         Summed: with other replicas

All times are seconds on one clock, from the start of the first recorded step. A recording comes
from the ranks (``merging.py``) or from a file (``chrome.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from procpipe.plan.task import Task


@dataclass(frozen=True)
class Ran:
    """A task that ran on a rank, from ``start_s`` to ``end_s``."""

    rank: int
    task: Task
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Hop:
    """A message from one stage to another."""

    payload: str  # what it carried: "activation", "gradient", …
    i: int  # the micro-batch
    source: int  # the rank that sent it
    destination: int  # the rank that received it
    num_bytes: int  # of its tensors
    posted_s: float  # when the sender began to send it
    sent_s: float  # when the sender continued
    asked_s: float  # when the receiver began to wait for it
    taken_s: float  # when the receiver had it

    @property
    def waited_s(self) -> float:
        """How long the receiver waited for it."""
        return self.taken_s - self.asked_s

    def __str__(self) -> str:
        return f"{self.payload} {self.i}: {self.source}->{self.destination}"


@dataclass(frozen=True)
class Summed:
    """A sum over all replicas, of gradients or losses, as one rank took part in it."""

    rank: int  # the rank
    what: str  # "gradients 0" for the first bucket, "loss", …
    num_bytes: int  # of its tensor
    start_s: float  # when the rank began it
    end_s: float  # when the rank first saw that it was over: all others had begun it, too
    asked_s: float  # when the rank began to wait for it
    taken_s: float  # when the rank had it

    @property
    def waited_s(self) -> float:
        """How long the rank waited for it."""
        return self.taken_s - self.asked_s


@dataclass(frozen=True)
class Step:
    """One run of a plan on all stages, of all replicas if there are several.

    A rank is the index of a stage, plus that of its replica times the number of stages.
    """

    number: int  # counted from 0 over all runs of a plan, including evaluation
    call: str  # the method that ran it: "step", "forward" or "backward"
    plan: str  # the digest of its plan; of replica 0, if there are several
    shares: tuple[tuple[int, ...], ...]  # by replica, the samples of each of its micro-batches
    begins_s: tuple[float, ...]  # when each rank began
    ends_s: tuple[float, ...]  # when each rank ended
    tasks: tuple[Ran, ...]  # what ran; those of a rank in order
    hops: tuple[Hop, ...]  # the messages, in the order in which they were sent
    #: What was added up over replicas; those of a rank in the order of the waits for them.
    sums: tuple[Summed, ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of ranks: stages times replicas."""
        return len(self.begins_s)

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.shares)

    @property
    def num_stages(self) -> int:
        """The number of stages of a replica."""
        return self.num_ranks // self.num_replicas

    def name_of(self, rank: int) -> str:
        """Describe a rank: "stage 1", of several replicas "stage 1 of replica 0"."""
        replica, stage = divmod(rank, self.num_stages)
        return f"stage {stage}" + (f" of replica {replica}" if self.num_replicas > 1 else "")

    @property
    def start_s(self) -> float:
        """When the first stage began."""
        return min(self.begins_s)

    @property
    def seconds(self) -> float:
        """The seconds from the first rank's start to the last one's end."""
        return max(self.ends_s) - self.start_s

    @property
    def trains(self) -> bool:
        """Whether it has backward tasks."""
        return any(ran.task.kind in "BIW" for ran in self.tasks)

    def row(self, rank: int) -> list[Ran]:
        """List a rank's tasks in order."""
        return [ran for ran in self.tasks if ran.rank == rank]

    def replica(self, replica: int) -> list[list[Task]]:
        """List the tasks of each stage of a replica, in order."""
        first = replica * self.num_stages
        ranks = range(first, first + self.num_stages)
        return [[ran.task for ran in self.row(rank)] for rank in ranks]


@dataclass(frozen=True)
class Clock:
    """A rank's clock, compared with that of rank 0."""

    stage: int  # the rank, which is the index of the stage unless there are replicas
    #: How far it is ahead, as measured last; all times are corrected for it. 0 if it is less than
    #: its error.
    offset_s: float
    error_s: float  # the possible error of the offset: half of the shortest round trip
    #: How much faster it runs, in parts per million; None if measured only once.
    drift_ppm: float | None


@dataclass(frozen=True)
class Recording:
    """The recorded steps of a run."""

    steps: tuple[Step, ...]  # in order; those in the middle of a long run are left out
    num_steps: int  # how many steps every stage ended
    plans: Mapping[str, str]  # the plans' texts by digest
    #: The arguments of the ``Stage``: "balance", "chunks", "checkpoint", "schedule", "layers",
    #: versions.
    facts: Mapping[str, Any]
    clocks: tuple[Clock, ...]  # one a rank
    #: Mean forward seconds of each layer for one micro-batch; empty if unknown.
    layer_s: tuple[float, ...] = ()
    is_closed: bool = True  # whether the run closed its stages, and did not fail

    @property
    def clock_error_s(self) -> float:
        """The largest possible error between the times of two stages."""
        errors = sorted(clock.error_s for clock in self.clocks)
        return sum(errors[-2:])

    def step(self, number: int | None = None) -> Step:
        """Return a step by its number; by default the last that trained, else the last.

        Raises:
            KeyError: it was not recorded; names the recorded steps.
        """
        if number is None:
            if not self.steps:
                raise KeyError("no step ended on all stages")
            return next((step for step in reversed(self.steps) if step.trains), self.steps[-1])
        found = next((step for step in self.steps if step.number == number), None)
        if found is None:
            kept = self.kept_text()
            raise KeyError(f"step {number} is not in it: it has {kept} of {self.num_steps}")
        return found

    def like(self, step: Step) -> list[Step]:
        """Return the steps with the same work; without the first of a run if there are others."""
        work = step.plan, step.call, step.shares
        same = [other for other in self.steps if (other.plan, other.call, other.shares) == work]
        return same[1:] if len(same) > 1 and same[0].number == 0 else same

    def kept_text(self) -> str:
        """Describe which steps were recorded: "steps 0 to 4 and 20 to 119"."""
        ranges: list[list[int]] = []
        for step in self.steps:
            if ranges and step.number == ranges[-1][1] + 1:
                ranges[-1][1] = step.number
            else:
                ranges.append([step.number, step.number])
        if not ranges:
            return "no step"
        words = [str(a) if a == b else f"{a} to {b}" for a, b in ranges]
        return f"step{'' if len(self.steps) == 1 else 's'} {' and '.join(words)}"
