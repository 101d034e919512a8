"""A pipeline written by hand: isend and irecv of tensors whose sizes all ranks know.

The floor of host cost over gloo: no skips, no changing shapes, no recomputation, nothing checked,
and the loss stays on the last rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rounds import Step
from benchmarks.workloads import Job


def bare_gloo(job: Job) -> Step:
    """Train as a pipeline of all ranks, fill and drain; every boundary has the input's shape."""
    rank, m, last = dist.get_rank(), job.num_micro_batches, job.num_stages - 1
    balance = job.balance(job.num_stages)
    first_layer = sum(balance[:rank])
    layers = job.model()[first_layer : first_layer + balance[rank]]
    assert isinstance(layers, nn.Sequential)
    micro_batches, loss_fn = job.micro_batches(), job.workload.loss_fn
    shape = micro_batches[0][0].shape

    def step() -> None:
        sends: list[tuple[Tensor, dist.Work | None]] = []
        passes: list[tuple[Tensor, Tensor]] = []
        posted = [_receive(shape, rank - 1) for _ in range(m)] if rank > 0 else []
        for i in range(m):
            if rank > 0:
                x, work = posted[i]
                work.wait()
                x.requires_grad_()
            else:
                x = micro_batches[i][0]
            y = layers(x)
            if rank < last:
                sends.append((y, dist.isend(y.detach(), rank + 1)))
            else:
                y = loss_fn(y, micro_batches[i][1]) / m
            passes.append((x, y))
        posted = [_receive(shape, rank + 1) for _ in range(m)] if rank < last else []
        for x, y in reversed(passes):
            if rank < last:
                gradient, work = posted.pop(0)
                work.wait()
                torch.autograd.backward(y, gradient)
            else:
                y.backward()
            if rank > 0:
                assert x.grad is not None
                sends.append((x.grad, dist.isend(x.grad, rank - 1)))
        for _, sending in sends:
            assert sending is not None
            sending.wait()

    return step


def _receive(shape: torch.Size, source: int) -> tuple[Tensor, dist.Work]:
    buffer = torch.empty(shape)
    work = dist.irecv(buffer, source)
    assert work is not None
    return buffer, work
