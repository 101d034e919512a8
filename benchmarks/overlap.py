"""Whether transfers run beside compute: large messages between stages that compute for a while.

A task waits for a fixed time without using a core, so that what is measured is the transport and
the order of transfers, also on a machine with fewer cores than stages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.report import Report, Table, bars
from benchmarks.rounds import Step, Times, launch, measure, ratio
from procpipe import Stage

NUM_STAGES, NUM_MICRO_BATCHES = 3, 8

_ALONE = "tasks alone"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 16], help="sizes of a message")
    parser.add_argument("--task-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> Report:
    figures: dict[int, Times] = {}
    tables = []
    for mib in options.mib:
        times = figures[mib] = launch(
            "benchmarks.overlap:measure_size",
            NUM_STAGES,
            mib=mib,
            task_s=options.task_ms / 1e3,
            num_rounds=options.rounds,
        )
        rows: list[list[Any]] = []
        for name, seconds in times.items():
            milliseconds = [s * 1e3 for s in seconds]
            median = statistics.median(milliseconds)
            rows.append([name, median, min(milliseconds), max(milliseconds)])
            rows[-1].append(ratio(seconds, times[_ALONE]))
        title = (
            f"overlap: {NUM_STAGES} stages, {NUM_MICRO_BATCHES} micro-batches of {mib} MiB, tasks "
            f"of {options.task_ms:.0f} ms, forward"
        )
        headings = ["", "ms a step", "min", "max", f"of {_ALONE}"]
        tables.append(Table(title, headings, rows, [".0f", ".0f", ".0f", ".2f"], [_NOTE]))
    return Report(
        "overlap",
        tables,
        figures,
        {"task_ms": options.task_ms},
        draw=lambda figure: bars(
            figure,
            {f"{mib} MiB": times for mib, times in figures.items()},
            _ALONE,
            f"time of a step, of {_ALONE}",
        ),
    )


_NOTE = (
    f"{_ALONE}: (m + n - 1) x the time of a task; bare gloo posts one receive ahead; the last "
    "stage gives one number a sample"
)


def measure_size(mib: int, task_s: float, num_rounds: int) -> Times:
    """Measure each contender; every rank calls it."""
    input = torch.zeros(NUM_MICRO_BATCHES, mib << 18)
    steps = {
        "procpipe": procpipe_step(input, task_s),
        "torch GPipe": torch_step(input, task_s),
        "bare gloo": bare_step(input, task_s),
        _ALONE: tasks_alone(task_s),
    }
    return measure(steps, num_rounds=num_rounds, num_steps=1)


class Wait(nn.Module):
    """Simulates a computation: takes a fixed time, and returns a tensor of the input's size.

    The last one returns one number a sample. Otherwise most of the time would be the gathering of
    the mini-batch's output: at 64 MiB a message, 512 MiB of new memory.
    """

    def __init__(self, task_s: float, *, is_last: bool) -> None:
        super().__init__()
        self.task_s = task_s
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        """Wait."""
        time.sleep(self.task_s)
        return x[:, :1].clone() if self.is_last else x.view_as(x)


def waits(task_s: float) -> list[Wait]:
    return [Wait(task_s, is_last=stage == NUM_STAGES - 1) for stage in range(NUM_STAGES)]


def procpipe_step(input: Tensor, task_s: float) -> Step:
    stage = Stage(nn.Sequential(*waits(task_s)), [1] * NUM_STAGES, chunks=NUM_MICRO_BATCHES)
    stage.eval()

    def step() -> None:
        with torch.no_grad():
            stage(input)

    return step


def torch_step(input: Tensor, task_s: float) -> Step:
    rank = dist.get_rank()
    part = PipelineStage(waits(task_s)[rank], rank, NUM_STAGES, torch.device("cpu"))
    schedule = ScheduleGPipe(part, n_microbatches=NUM_MICRO_BATCHES)

    def step() -> None:
        with torch.no_grad():
            schedule.step(*((input,) if rank == 0 else ()))

    return step


def bare_step(input: Tensor, task_s: float) -> Step:
    rank, part = dist.get_rank(), input.chunk(NUM_MICRO_BATCHES)
    layer = waits(task_s)[rank]

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
            y = layer(x)
            if rank < NUM_STAGES - 1:
                sends.append((y, dist.isend(y, rank + 1)))
            else:
                outputs.append(y)
        for _, sending in sends:
            sending.wait()
        if outputs:
            torch.cat(outputs)

    return step


def tasks_alone(task_s: float) -> Step:
    return lambda: time.sleep(task_s * (NUM_MICRO_BATCHES + NUM_STAGES - 1))
