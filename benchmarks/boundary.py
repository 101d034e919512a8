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
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import Report, Table
from benchmarks.rounds import Step, Times, launch, measure, ratio
from benchmarks.workloads import Job, Workload

_OURS, _OURS_SOCKETS, _PEER, _BARE = "procpipe", "procpipe over sockets", "torch GPipe", "bare gloo"
_ALONE = "one process"

_NUM_STAGES = 2

#: Micro-batches a step: few where messages are large and are all held, many where they are small.
_M_OF_SIZES, _M_OF_TENSORS = 4, 8

_FLOATS_A_TENSOR = 64

#: Messages in a turn, or bytes if they are large: so many that its start and end hardly count.
_A_TURN, _A_TURN_BYTES = 80, 64 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    sizes = [1 << k for k in range(0, 17, 2)]
    tensors = [1 << k for k in range(7)]
    parser.add_argument("--kib", type=int, nargs="+", default=sizes, help="sizes of a message")
    parser.add_argument("--tensors", type=int, nargs="+", default=tensors)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    by_size = _launch("measure_sizes", options.kib, options.rounds)
    by_number = _launch("measure_tensors", options.tensors, options.rounds)
    tables = [tabulate_sizes(by_size), tabulate_rates(by_size), tabulate_tensors(by_number)]
    figures = {"KiB": by_size, "tensors": by_number}
    settings = vars(options) | {"out": str(options.out)}
    return Report("boundary", tables, figures, settings, lambda f: _draw(f, by_size, by_number))


def seconds_a_message(times: Times, m: int) -> dict[str, float]:
    """Return each contender's median seconds a message: a step has ``m`` down and ``m`` up."""
    return {name: statistics.median(seconds) / (2 * m) for name, seconds in times.items()}


def tabulate_sizes(by_size: Mapping[int, Times]) -> Table:
    """Lay out the time of a message, by its size."""
    return _table(
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


def tabulate_rates(by_size: Mapping[int, Times]) -> Table:
    """Lay out the rate of messages, by their size."""
    rows: list[list[Any]] = [
        [
            size_text(kib),
            *(kib * 1024 / 1e9 / s for s in seconds_a_message(times, _M_OF_SIZES).values()),
        ]
        for kib, times in by_size.items()
    ]
    names = list(next(iter(by_size.values())))
    title = "boundary: GB/s of the same messages, tasks and all"
    return Table(title, ["", *names], rows, [".3f"] * len(names))


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


def measure_sizes(grid: list[int], rounds: int) -> list[Times]:
    """Measure each size of a message, in KiB; every rank calls it."""
    return [measure_size(kib, _M_OF_SIZES, rounds) for kib in grid]


def measure_size(kib: int, m: int, rounds: int) -> Times:
    """Measure one size of a message; every rank calls it."""
    from benchmarks.peers.bare import bare_gloo

    job = _job("size", lambda: nn.Sequential(Pass(), Pass()), kib * 256, m)
    more = {_OURS_SOCKETS: "sockets"}
    num_messages = min(_A_TURN, _A_TURN_BYTES // (kib * 1024))
    num_steps = max(1, num_messages // (2 * m))
    return _measure(job, more, {_BARE: bare_gloo(job)}, rounds, num_steps)


def measure_tensors(grid: list[int], rounds: int) -> list[Times]:
    """Measure each number of tensors in a message; every rank calls it."""
    return [_measure_tensors(number, rounds) for number in grid]


def _measure_tensors(number: int, rounds: int) -> Times:
    def model() -> nn.Sequential:
        return nn.Sequential(Fan(number), Join())

    job = _job("tensors", model, number * _FLOATS_A_TENSOR, _M_OF_TENSORS)
    return _measure(job, {}, {}, rounds, _A_TURN // (2 * _M_OF_TENSORS))


def _launch(function: str, grid: Sequence[int], rounds: int) -> dict[int, Times]:
    times = launch(f"benchmarks.boundary:{function}", _NUM_STAGES, grid=list(grid), rounds=rounds)
    return dict(zip(grid, times, strict=True))


def _measure(
    job: Job,
    transports: Mapping[str, str],
    more: Mapping[str, Step],
    rounds: int,
    num_steps: int,
) -> Times:
    from benchmarks.peers.alone import one_process
    from benchmarks.peers.ours import stage_of, step_of
    from benchmarks.peers.torch_pipelining import gpipe

    stages = {_OURS: stage_of(job)}
    stages |= {name: stage_of(job, transport=each) for name, each in transports.items()}
    steps = {name: step_of(stage, job) for name, stage in stages.items()}
    steps |= {_PEER: gpipe(job), **more, _ALONE: one_process(job)}
    times = measure(steps, num_rounds=rounds, num_steps=num_steps)
    for stage in stages.values():
        stage.close()
    return times


def _job(name: str, model: Callable[[], nn.Sequential], num_floats: int, m: int) -> Job:
    workload = Workload(
        name, "", "", model, (1, num_floats), (1, 1), lambda output, target: output.mean()
    )
    return Job(workload, _NUM_STAGES, m)


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
        rows[-1].append(ratio(times[_OURS], times[_PEER]))
    formats = [*([".0f"] * len(names)), ".2f"]
    return Table(title, ["", *names, f"{_OURS} of {_PEER}"], rows, formats, notes)


def _draw(figure: Any, by_size: Mapping[int, Times], by_number: Mapping[int, Times]) -> None:
    """Draw the time of a message, by size and by number of tensors."""
    left, right = figure.subplots(1, 2)
    for axis, by_row, m in ((left, by_size, _M_OF_SIZES), (right, by_number, _M_OF_TENSORS)):
        names = list(next(iter(by_row.values())))
        for name in names:
            values = [seconds_a_message(times, m)[name] * 1e6 for times in by_row.values()]
            colour = f"C{(_OURS, _OURS_SOCKETS, _PEER, _BARE, _ALONE).index(name)}"
            axis.plot(list(by_row), values, marker=".", label=name, color=colour)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3, which="both")
    left.set_xticks(list(by_size), [size_text(kib) for kib in by_size], rotation=45)
    right.set_xticks(list(by_number), [str(number) for number in by_number])
    left.set_ylabel("us a message")
    left.set_xlabel("size of a message")
    right.set_xlabel(f"tensors of {_FLOATS_A_TENSOR} floats a message")
    left.legend(fontsize=8)
