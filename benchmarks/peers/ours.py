"""procpipe, as a user writes it."""

from __future__ import annotations

from typing import Any

from benchmarks.rounds import Step
from benchmarks.workloads import Job
from procpipe import Stage
from procpipe.job.world import World


def procpipe(
    job: Job, checkpoint: str = "never", *, partitions_per_stage: int = 1, **options: Any
) -> Step:
    """Train as a pipeline of all ranks, each with so many partitions."""
    stage = stage_of(job, checkpoint, partitions_per_stage=partitions_per_stage, **options)
    return step_of(stage, job)


def stage_of(
    job: Job,
    checkpoint: str = "never",
    *,
    partitions_per_stage: int = 1,
    transport: str | None = None,
    **options: Any,
) -> Stage:
    """Make this rank's stage, for callers that need more than its step."""
    World.transport = transport or job.transport
    return Stage(
        job.model(),
        job.balance(partitions_per_stage * job.num_stages),
        chunks=job.num_micro_batches,
        devices=job.devices,
        checkpoint=checkpoint,
        loss_fn=job.workload.loss_fn,
        **options,
    )


def step_of(stage: Stage, job: Job) -> Step:
    """Make a stage's step."""
    input, target = job.input, job.target
    return lambda: stage.step(input, target)
