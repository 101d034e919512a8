"""Whether transfers run beside compute: large boundaries between stages that compute for a while.

    python -m benchmarks.overlap [--rounds 5] [--mib 64] [--task-ms 50]

3 stages, 8 micro-batches, forward only. A task waits for a fixed time without using a core, so that
what is measured is the transport and the order of transfers, also on a machine with fewer cores
than stages. Compared in one run: procpipe, ``torch.distributed.pipelining``'s ScheduleGPipe, bare
gloo with one receive posted ahead (the best one can write by hand on this transport), and the tasks
alone: (m + n - 1) x task time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.rounds import is_worker, launch, machine, measure, table
from procpipe import Stage

NUM_STAGES, NUM_MICRO_BATCHES = 3, 8


class Wait(nn.Module):
    """Stands for a computation: takes a fixed time, and gives a tensor of the input's size."""

    def __init__(self, task_s: float) -> None:
        super().__init__()
        self.task_s = task_s

    def forward(self, x: Tensor) -> Tensor:
        """Wait."""
        time.sleep(self.task_s)
        return x.view_as(x)


def procpipe_step(input: Tensor, task_s: float) -> Callable[[], object]:
    model = nn.Sequential(*[Wait(task_s) for _ in range(NUM_STAGES)])
    stage = Stage(model, [1] * NUM_STAGES, chunks=NUM_MICRO_BATCHES)
    stage.eval()

    def step() -> None:
        with torch.no_grad():
            stage(input)

    return step


def torch_step(input: Tensor, task_s: float) -> Callable[[], object]:
    rank = dist.get_rank()
    part = PipelineStage(Wait(task_s), rank, NUM_STAGES, torch.device("cpu"))
    schedule = ScheduleGPipe(part, n_microbatches=NUM_MICRO_BATCHES)

    def step() -> None:
        with torch.no_grad():
            schedule.step(*((input,) if rank == 0 else ()))

    return step


def bare_step(input: Tensor, task_s: float) -> Callable[[], object]:
    rank, part = dist.get_rank(), input.chunk(NUM_MICRO_BATCHES)

    def step() -> None:
        posted: deque[tuple[Tensor, Any]] = deque()
        sends: list[tuple[Tensor, Any]] = []
        outputs = []
        num_posted = 0
        for i in range(NUM_MICRO_BATCHES):
            if rank == 0:
                x = part[i]
            else:
                while num_posted < min(i + 2, NUM_MICRO_BATCHES):  # one ahead
                    buffer = torch.empty_like(part[0])
                    posted.append((buffer, dist.irecv(buffer, rank - 1)))
                    num_posted += 1
                x, receiving = posted.popleft()
                receiving.wait()
            time.sleep(task_s)
            if rank < NUM_STAGES - 1:
                sends.append((x, dist.isend(x, rank + 1)))
            else:
                outputs.append(x)
        for _, sending in sends:
            sending.wait()
        if outputs:
            torch.cat(outputs)

    return step


def tasks_alone(task_s: float) -> Callable[[], object]:
    return lambda: time.sleep(task_s * (NUM_MICRO_BATCHES + NUM_STAGES - 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--task-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    if not is_worker():
        return launch("benchmarks.overlap", NUM_STAGES, sys.argv[1:])
    dist.init_process_group("gloo")
    task_s = arguments.task_ms / 1e3
    input = torch.zeros(NUM_MICRO_BATCHES, arguments.mib << 18)
    times = measure(
        {
            "procpipe": procpipe_step(input, task_s),
            "torch.distributed.pipelining ScheduleGPipe": torch_step(input, task_s),
            "bare gloo, one receive posted ahead": bare_step(input, task_s),
            "tasks alone": tasks_alone(task_s),
        },
        num_rounds=arguments.rounds,
        num_steps=arguments.steps,
    )
    if dist.get_rank() == 0:
        print(machine())
        print(
            f"{NUM_STAGES} stages, {NUM_MICRO_BATCHES} micro-batches of {arguments.mib} MiB, tasks "
            f"of {arguments.task_ms:.0f} ms, forward\n"
        )
        print(table(times, unit="milliseconds a step", scale=1e3, baseline="tasks alone"))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
