"""``torch.distributed.pipelining`` with each of its schedules, over gloo or NCCL.

It has no skip tensors. Those of a U-Net are carried through every boundary by hand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.rounds import Step
from benchmarks.workloads import Job


def gpipe(job: Job) -> Step:
    """Fill and drain."""
    return _single(job, ScheduleGPipe)


def one_f_one_b(job: Job) -> Step:
    """One forward, one backward."""
    return _single(job, Schedule1F1B)


def interleaved(job: Job) -> Step:
    """Two partitions a process, one after the other around the ring."""
    n, rank = job.num_stages, dist.get_rank()
    return _multi(job, ScheduleInterleaved1F1B, (rank, rank + n))


def zero_bubble_v(job: Job) -> Step:
    """Two partitions a process, down and up again, with the backward split in two."""
    n, rank = job.num_stages, dist.get_rank()
    return _multi(job, ScheduleZBVZeroBubble, (rank, 2 * n - 1 - rank))


def _single(job: Job, schedule_class: Any) -> Step:
    (stage,) = _stages(job, job.num_stages, (dist.get_rank(),))
    schedule = schedule_class(
        stage, n_microbatches=job.num_micro_batches, loss_fn=job.workload.loss_fn
    )
    return _step(job, schedule, [stage])


def _multi(job: Job, schedule_class: Any, indices: tuple[int, ...]) -> Step:
    stages = _stages(job, 2 * job.num_stages, indices)
    schedule = schedule_class(
        stages, n_microbatches=job.num_micro_batches, loss_fn=job.workload.loss_fn
    )
    return _step(job, schedule, stages)


def _step(job: Job, schedule: Any, stages: list[PipelineStage]) -> Step:
    inputs = (job.input,) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        target = job.target
        return lambda: schedule.step(*inputs, target=target)
    return lambda: schedule.step(*inputs)


def _stages(job: Job, num_partitions: int, indices: tuple[int, ...]) -> list[PipelineStage]:
    balance = job.balance(num_partitions)
    layers = list(job.model().named_children())
    parts = []
    for size in balance:
        parts.append(layers[:size])
        layers = layers[size:]
    module_of = _Carrying if job.workload.has_skips else _plain
    return [
        PipelineStage(
            module_of(parts[index]).to(job.own_device), index, num_partitions, job.own_device
        )
        for index in indices
    ]


def _plain(layers: list[tuple[str, nn.Module]]) -> nn.Module:
    if len(layers) == 1:  # it may take the tensors of a tuple one by one, nn.Sequential may not
        return layers[0][1]
    return nn.Sequential(*(layer for _, layer in layers))


class _Carrying(nn.Module):
    """Layers of the U-Net, with the skip tensors that are under way beside the input.

    Skip tensors are popped in the opposite order of their stashes, so they make a stack.
    """

    def __init__(self, layers: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names = [name for name, _ in layers]
        self.layers = nn.ModuleList(layer for _, layer in layers)

    def forward(self, x: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers; the head's output goes alone."""
        stack = list(carried)
        for name, layer in zip(self.names, self.layers, strict=True):
            if name.endswith("_stash"):
                stack.append(x)
            elif name.endswith("_pop"):
                x = torch.cat((stack.pop(), x), dim=1)
            else:
                x = layer(x)
        return (x, *stack) if stack else x
