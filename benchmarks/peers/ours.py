"""procpipe, as a user writes it."""

from __future__ import annotations

from typing import Any

from benchmarks.rounds import Step
from benchmarks.workloads import Job
from procpipe import Stage

__all__ = ["procpipe"]


def procpipe(job: Job, checkpoint: str = "never", **options: Any) -> Step:
    """Train as a pipeline of all ranks."""
    stage = Stage(
        job.model(),
        job.balance(job.num_stages),
        chunks=job.num_micro_batches,
        checkpoint=checkpoint,
        loss_fn=job.workload.loss_fn,
        **options,
    )
    input, target = job.input, job.target
    return lambda: stage.step(input, target)
