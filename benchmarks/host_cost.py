"""What a pipeline costs the host: tiny layers, so that nearly all time is overhead.

    python -m benchmarks.host_cost [--rounds 7] [--micro-batches 16 64]

8 x Linear(16, 16) in float32, 2 stages, micro-batches of 4 samples, no recomputation. Compared
in one run: procpipe, ``torch.distributed.pipelining``'s ScheduleGPipe over gloo, and one process
that runs the same micro-batches one after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.rounds import is_worker, launch, machine, measure, table
from procpipe import Stage

SAMPLES_A_MICRO_BATCH = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])


def procpipe_step(input: Tensor, target: Tensor, m: int) -> Callable[[], object]:
    stage = Stage(model(), [4, 4], chunks=m, checkpoint="never", loss_fn=F.mse_loss)
    return lambda: stage.step(input, target)


def torch_step(input: Tensor, target: Tensor, m: int) -> Callable[[], object]:
    rank = dist.get_rank()
    layers = model()[:4] if rank == 0 else model()[4:]
    part = PipelineStage(layers, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(part, n_microbatches=m, loss_fn=F.mse_loss)
    if rank == 0:
        return lambda: schedule.step(input)
    return lambda: schedule.step(target=target)


def one_process_step(input: Tensor, target: Tensor, m: int) -> Callable[[], object]:
    whole = model()

    def step() -> None:
        if dist.get_rank() == 0:
            losses = [
                F.mse_loss(whole(x), y) / m
                for x, y in zip(input.chunk(m), target.chunk(m), strict=True)
            ]
            for loss in reversed(losses):
                loss.backward()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16, 64])
    arguments = parser.parse_args()
    if not is_worker():
        return launch("benchmarks.host_cost", 2, sys.argv[1:])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(machine())
    for m in arguments.micro_batches:
        input = torch.randn(SAMPLES_A_MICRO_BATCH * m, 16)
        target = torch.randn(SAMPLES_A_MICRO_BATCH * m, 16)
        times = measure(
            {
                "procpipe": procpipe_step(input, target, m),
                "torch.distributed.pipelining ScheduleGPipe": torch_step(input, target, m),
                "one process": one_process_step(input, target, m),
            },
            num_rounds=arguments.rounds,
            num_steps=arguments.steps,
        )
        if dist.get_rank() == 0:
            print(f"\nm = {m}")
            baseline = "torch.distributed.pipelining ScheduleGPipe"
            unit = "microseconds a task: step time / (2 tasks x m)"
            print(table(times, unit=unit, scale=1e6 / (2 * m), baseline=baseline))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
