"""No pipeline: one process, with one thread or several, and several independent processes.

The independent copies show the speed of the machine: they share its caches and its memory
bandwidth as stages do, and do not wait for one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.rounds import Step
from benchmarks.workloads import Job


def one_process(job: Job) -> Step:
    """Train on rank 0, micro-batch by micro-batch, each forward and then backward."""
    step = _step(job)
    return step if dist.get_rank() == 0 else _nothing


def one_process_with_threads(job: Job) -> Step:
    """Train on rank 0 with as many threads, and cores, as a pipeline has processes."""
    step = _step(job)

    def with_threads() -> None:
        with _threads(job.num_stages):
            step()

    return with_threads if dist.get_rank() == 0 else _nothing


def copies_at_once(job: Job) -> Step:
    """Train a copy of the whole model on every rank at once, each with all micro-batches."""
    return _step(job)


def _step(job: Job) -> Step:
    model, loss_fn = job.model().to(job.own_device), job.workload.loss_fn
    m = job.num_micro_batches
    micro_batches = job.micro_batches()

    def step() -> None:
        for input, target in micro_batches:
            (loss_fn(model(input), target) / m).backward()

    return step


def _nothing() -> None:
    """Do nothing on ranks other than 0."""


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Use all cores in this process, which procpipe may have pinned to some of them."""
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, pinned)
