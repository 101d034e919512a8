"""The cost of crossing a boundary as messages grow in size, or in number of tensors.

Two stages whose layers compute almost nothing, so that a step is mostly ``2m`` messages, ``m`` in
each direction, one after the other:

    stage 0    passes its input on ── m activations ──>  stage 1   reads it, for the loss
               ends                <── m gradients ────            writes a gradient
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders import BARE, CONTENDERS, ONE_PROCESS
from benchmarks.peers.ours import stage_of, step_of
from benchmarks.report import OF_BARE, OF_TORCH, Report, Table
from benchmarks.rounds import Times, launch, measure, ratio
from benchmarks.workloads import Job, Workload

DEVICES = ("cpu", "cuda")

_OURS, _OURS_SOCKETS, _PEER = "procpipe", "procpipe over sockets", "torch GPipe"
_BARE, _ALONE = BARE, ONE_PROCESS

_NUM_STAGES = 2

#: Micro-batches a step: few where messages are large and are all held, many where they are small.
_M_OF_SIZES, _M_OF_TENSORS = 4, 8

_FLOATS_A_TENSOR = 64

#: Of which there are ratios on the page.
_SHOWN_KIB, _SHOWN_TENSORS = (1, 64, 1 << 10, 1 << 16), (2, 64)

#: Messages in a turn, or bytes if they are large: so many that its start and end hardly count.
_A_TURN, _A_TURN_BYTES = 80, 64 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kib", type=int, nargs="+", help="of a message; else to 64 or 256 MiB")
    parser.add_argument("--tensors", type=int, nargs="*", help="by default 1 to 64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", help="of procpipe's large tensors")


def run(options: argparse.Namespace) -> Report:
    most, each = {"small": (17, 2), "full": (19, 3), "tiny": (5, 2)}[options.sizes]
    sizes = options.kib or [1 << k for k in range(0, most, each)]
    numbers = [1 << k for k in range(7)] if options.tensors is None else options.tensors
    launched = partial(_launch, options=options)
    by_size = launched("measure_sizes", sizes)
    by_number = launched("measure_tensors", numbers) if numbers else {}
    tables = [tabulate_sizes(by_size)]
    tables += [tabulate_tensors(by_number)] if by_number else []
    shown = [(size_text(kib), times) for kib, times in by_size.items() if kib in _SHOWN_KIB]
    shown += [(f"{k} tensors", times) for k, times in by_number.items() if k in _SHOWN_TENSORS]
    ratios = {f"messages of {what}": ratios_of(times) for what, times in shown}
    return Report(
        "boundary",
        tables,
        {"KiB": by_size, "tensors": by_number},
        vars(options) | {"out": str(options.out)},
        ratios=ratios,
    )


def ratios_of(times: Times) -> dict[str, float]:
    """Return procpipe's ratios to those contenders that were run."""
    against = {OF_TORCH: _PEER, OF_BARE: _BARE}
    return {of: ratio(times[_OURS], times[name]) for of, name in against.items() if name in times}


def seconds_a_message(times: Times, m: int) -> dict[str, float]:
    """Return each contender's median seconds a message: a step has ``m`` down and ``m`` up."""
    return {name: statistics.median(seconds) / (2 * m) for name, seconds in times.items()}


def tabulate_sizes(by_size: Mapping[int, Times]) -> Table:
    """Lay out the time of a message, by its size, and procpipe's rate."""
    table = _table(
        f"boundary: us a message of one tensor, by its size; {_NUM_STAGES} stages, "
        f"m = {_M_OF_SIZES}",
        {size_text(kib): times for kib, times in by_size.items()},
        _M_OF_SIZES,
        [
            "us a message: step time / 2m, with the tasks",
            f"{_ALONE}: the tasks alone, on rank 0: the loss reads the tensor, its backward writes "
            "one",
        ],
    )
    rows = [
        [*row, kib * 1024 / 1e9 / seconds_a_message(times, _M_OF_SIZES)[_OURS]]
        for row, (kib, times) in zip(table.rows, by_size.items(), strict=True)
    ]
    headings, formats = [*table.headings, f"{_OURS}, GB/s"], [*table.formats, ".3f"]
    return replace(table, headings=headings, rows=rows, formats=formats)


def tabulate_tensors(by_number: Mapping[int, Times]) -> Table:
    """Lay out the time of a message, by its number of tensors."""
    return _table(
        f"boundary: us a message, by its number of tensors of {_FLOATS_A_TENSOR} floats; "
        f"{_NUM_STAGES} stages, m = {_M_OF_TENSORS}",
        {str(number): times for number, times in by_number.items()},
        _M_OF_TENSORS,
        ["bare gloo is not run: it is written for one tensor"],
    )


def size_text(kib: int) -> str:
    """Write a size in KiB or, from 1024 on, in MiB."""
    return f"{kib} KiB" if kib < 1024 else f"{kib / 1024:g} MiB"


def measure_sizes(grid: list[int], rounds: int, transport: str | None = None) -> list[Times]:
    """Measure each size of a message, in KiB; every rank calls it."""
    return [measure_size(kib, _M_OF_SIZES, rounds, transport) for kib in grid]


def measure_size(kib: int, m: int, rounds: int, transport: str | None = None) -> Times:
    """Measure one size of a message; every rank calls it."""
    job = _job("size", lambda: nn.Sequential(Pass(), Pass()), kib * 256, m, transport)
    num_messages = min(_A_TURN, _A_TURN_BYTES // (kib * 1024))
    num_steps = max(1, num_messages // (2 * m))
    sockets = job.device == "cpu" and transport is None
    return _measure(job, sockets, [_BARE, _PEER], rounds, num_steps)


def measure_tensors(grid: list[int], rounds: int, transport: str | None = None) -> list[Times]:
    """Measure each number of tensors in a message; every rank calls it."""
    return [_measure_tensors(number, rounds, transport) for number in grid]


def _measure_tensors(number: int, rounds: int, transport: str | None) -> Times:
    def model() -> nn.Sequential:
        return nn.Sequential(Fan(number), Join())

    job = _job("tensors", model, number * _FLOATS_A_TENSOR, _M_OF_TENSORS, transport)
    return _measure(job, False, [_PEER], rounds, _A_TURN // (2 * _M_OF_TENSORS))


def _launch(function: str, grid: Sequence[int], options: argparse.Namespace) -> dict[int, Times]:
    times = launch(
        f"benchmarks.boundary:{function}",
        _NUM_STAGES,
        device=options.device,
        grid=list(grid),
        rounds=options.rounds,
        transport=options.transport,
    )
    return dict(zip(grid, times, strict=True))


def _measure(
    job: Job, with_sockets: bool, peers: Sequence[str], rounds: int, num_steps: int
) -> Times:
    stages = {_OURS: stage_of(job)}
    if with_sockets:
        stages[_OURS_SOCKETS] = stage_of(job, transport="sockets")
    steps = {name: step_of(stage, job) for name, stage in stages.items()}
    for name in (*peers, _ALONE):
        if CONTENDERS[name].why_not(job) is None:
            steps[name] = CONTENDERS[name].make(job)
    times = measure(steps, num_rounds=rounds, num_steps=num_steps)
    for stage in stages.values():
        stage.close()
    return times


def _job(
    name: str,
    model: Callable[[], nn.Sequential],
    num_floats: int,
    m: int,
    transport: str | None = None,
) -> Job:
    workload = Workload(
        name, "", "", model, (1, num_floats), (1, 1), lambda output, target: output.mean()
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Job(workload, _NUM_STAGES, m, device, transport)


class _Through(torch.autograd.Function):
    """Passes on its input and its gradient unchanged; a parameter gets a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (parameter,) = ctx.saved_tensors
        return gradients[0].contiguous(), torch.zeros_like(parameter)


class Pass(nn.Module):
    """Does nothing; its parameter requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        y: Tensor = _Through.apply(x, self.parameter)  # type: ignore[no-untyped-call]
        return y


class Fan(nn.Module):
    """Cuts its input into a tuple of tensors."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.ones(number * _FLOATS_A_TENSOR))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Scale and cut."""
        return (x * self.weight).chunk(self.number, dim=1)


class Join(nn.Module):
    """Joins tensors, which pipelines pass as one tuple or as several arguments."""

    def forward(self, *parts: Any) -> Tensor:
        """Join."""
        return torch.cat(parts[0] if isinstance(parts[0], tuple) else parts, dim=1)


def _table(title: str, by_row: Mapping[str, Times], m: int, notes: Sequence[str]) -> Table:
    names = list(next(iter(by_row.values())))
    rows: list[list[Any]] = []
    for row, times in by_row.items():
        rows.append([row, *(s * 1e6 for s in seconds_a_message(times, m).values())])
        rows[-1].append(ratios_of(times).get(OF_TORCH))
    formats = [*([".0f"] * len(names)), ".2f"]
    return Table(title, ["", *names, f"{_OURS} of {_PEER}"], rows, formats, notes)
