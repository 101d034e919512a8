"""Which rank runs which stage of which replica.

    4 stages, 2 replicas     replica 0   ranks 0 1 2 3
                             replica 1   ranks 4 5 6 7

Neighbouring stages are neighbouring ranks, and so neighbouring GPUs: they exchange more than
replicas. In a ``DeviceMesh`` a pipeline has some of the job's ranks. Within it, they are numbered
from 0; messages name them by their numbers in the job.

PURE: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from procpipe.job.board import Page

#: The numbers of ranks where the job is one pipeline and its replicas.
IN_ORDER = range(1 << 62)


@dataclass(frozen=True)
class Grid:
    """A rank's place among stages and replicas."""

    rank: int  # this process's rank
    num_ranks: int  # how many there are: stages times replicas
    num_replicas: int = 1  # pipelines of the same model
    #: Of each rank, its number in the job, by which messages name it.
    numbers: Sequence[int] = IN_ORDER

    @classmethod
    def of(cls, reading: Page) -> Grid:
        """Return the place of a board's process."""
        return cls(reading.place, reading.num_ranks, reading.num_replicas)

    @cached_property
    def num_stages(self) -> int:
        """Stages of one replica."""
        return self.num_ranks // self.num_replicas

    @cached_property
    def stage(self) -> int:
        """This rank's stage, within its replica."""
        return self.rank % self.num_stages

    @cached_property
    def replica(self) -> int:
        """The replica that this rank belongs to."""
        return self.rank // self.num_stages

    @property
    def job_rank(self) -> int:
        """This rank's number in the job."""
        return self.numbers[self.rank]

    @property
    def job_ranks(self) -> Sequence[int]:
        """The numbers in the job of all these ranks."""
        return self.numbers[: self.num_ranks]

    @property
    def is_part(self) -> bool:
        """Whether other ranks of the job make pipelines of their own."""
        return self.numbers is not IN_ORDER

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """Return the rank that runs a stage, by default of this replica."""
        return (self.replica if replica is None else replica) * self.num_stages + stage

    def same_stage(self) -> list[int]:
        """Return the ranks that run this rank's stage, by replica."""
        return list(range(self.stage, self.num_ranks, self.num_stages))

    def same_replica(self) -> list[int]:
        """Return the ranks of this rank's replica, by stage."""
        return list(range(self.rank_of(0), self.rank_of(self.num_stages)))

    def stage_name(self, rank: int) -> str:
        """Describe the stage of a rank: "stage 1", of several replicas "stage 1 of replica 0"."""
        replica, stage = divmod(rank, self.num_stages)
        return f"stage {stage}" + (f" of replica {replica}" if self.num_replicas > 1 else "")

    def name_of(self, rank: int) -> str:
        """Describe a rank for people, by its stage: "stage 1 (rank 1)"."""
        return f"{self.stage_name(rank)} (rank {self.numbers[rank]})"

    def rank_name(self, rank: int) -> str:
        """Describe a rank: "rank 1", of several replicas "rank 1 (stage 1 of replica 0)"."""
        of = f" ({self.stage_name(rank)})" if self.num_replicas > 1 else ""
        return f"rank {self.numbers[rank]}{of}"
