"""How much of adding up gradients over replicas runs beside the pipeline.

    stage 1   B6 ──── B7 ────            its last backward ends first: sums run beside stage 0's
                        └ sum ─ sum ─
    stage 0      B6 ────  B7 ────        its first sums run beside its own last backward
                             └ sum ─ sum ─ └ only the last is waited for

Layers wait for a fixed time without using a core, and so does an artificial link between replicas,
so that what is measured is the order of events, also on a machine with fewer cores than processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import Report, Table, bars
from benchmarks.rounds import Step, Times, launch, measure
from procpipe import Stage
from procpipe.plan import buckets

NUM_STAGES, REPLICAS, NUM_MICRO_BATCHES = 2, 2, 8

_FREE, _BESIDE, _AFTER = "sums take no time", "sums beside the pipeline", "sums after it"

#: The parameters of a layer; each layer is a bucket.
_LAYER_BYTES = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--layers", type=int, nargs="+", default=[8], help="of a stage")
    parser.add_argument("--forward-ms", type=float, default=100.0, help="of a stage's layers")
    parser.add_argument("--sums-ms", type=float, default=150.0, help="of a stage's gradients")
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> Report:
    settings = {
        "forward_s": options.forward_ms / 1e3,
        "sums_s": options.sums_ms / 1e3,
        "num_rounds": options.rounds,
    }
    figures: dict[str, Times] = {}
    for schedule in options.schedules:
        for layers in options.layers:
            figures[f"{schedule}, {layers} layers"] = launch(
                "benchmarks.replicas:measure_all",
                NUM_STAGES * REPLICAS,
                schedule=schedule,
                num_layers=layers,
                **settings,
            )
    return Report(
        "replicas",
        [tabulate(figures, options.forward_ms, options.sums_ms)],
        figures,
        settings,
        draw=lambda figure: bars(figure, figures, _FREE, f"time of a step, of {_FREE}"),
    )


def tabulate(figures: dict[str, Times], forward_ms: float, sums_ms: float) -> Table:
    """Lay out times, and which share of the sums' time is hidden."""
    rows: list[list[Any]] = []
    for name, times in figures.items():
        medians = [statistics.median(times[each]) * 1e3 for each in (_FREE, _BESIDE, _AFTER)]
        rows.append([name, *medians, hidden(times)])
    return Table(
        f"replicas: {NUM_STAGES} stages, {REPLICAS} replicas, {NUM_MICRO_BATCHES} micro-batches, "
        f"a stage's layers take {forward_ms:g} ms forward and twice that backward, its sums "
        f"{sums_ms:g} ms",
        ["layers of a stage", _FREE, _BESIDE, _AFTER, "hidden"],
        rows,
        [".1f", ".1f", ".1f", ".0%"],
        [
            "ms a step; hidden: 1 - (beside - none) / (after - none), the median of the rounds; "
            "layers and the link between replicas are artificial, the sums themselves are gloo's"
        ],
    )


def hidden(times: Times) -> float:
    """Return the share of the sums' time that a step does not take longer for."""
    rounds = zip(times[_FREE], times[_BESIDE], times[_AFTER], strict=True)
    return statistics.median(1 - (beside - free) / (after - free) for free, beside, after in rounds)


def measure_all(
    schedule: str, num_layers: int, forward_s: float, sums_s: float, num_rounds: int
) -> Times:
    """Measure each contender; every rank calls it."""
    buckets.BUCKET_BYTES = _LAYER_BYTES
    steps = {
        name: step_of(schedule, num_layers, forward_s / num_layers, link_s / num_layers, name)
        for name, link_s in ((_FREE, 0.0), (_BESIDE, sums_s), (_AFTER, sums_s))
    }
    return measure(steps, num_rounds=num_rounds, num_steps=1)


def step_of(schedule: str, num_layers: int, layer_s: float, bucket_s: float, name: str) -> Step:
    torch.manual_seed(0)
    layers = [Wait(layer_s) for _ in range(NUM_STAGES * num_layers)]
    stage = Stage(
        nn.Sequential(*layers),
        [num_layers] * NUM_STAGES,
        chunks=NUM_MICRO_BATCHES,
        schedule=schedule,
        checkpoint="never",
        replicas=REPLICAS,
        loss_fn=torch.nn.functional.mse_loss,
    )
    data = torch.zeros(NUM_MICRO_BATCHES, 4), torch.ones(NUM_MICRO_BATCHES, 4)
    stage.step(*data)
    replicas: Any = stage._calls.pipeline.replicas  # type: ignore[union-attr]
    link = SlowGroup(replicas._group, bucket_s)
    replicas._group = link

    def step() -> None:
        for parameter in stage.parameters():
            parameter.grad = None
        stage.step(*data)

    if name == _AFTER:
        replicas._begin_complete = lambda: None
        end = replicas.end

        def begin_and_end() -> None:
            del replicas._begin_complete
            end()
            replicas._begin_complete = lambda: None

        replicas.end = begin_and_end
    return step


class SlowGroup:
    """A group whose sums of buckets also take the time of an artificial link, in turn."""

    def __init__(self, group: Any, bucket_s: float) -> None:
        self._group = group
        self._bucket_s = bucket_s
        self._is_free_at_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def begin_sum(self, tensor: Tensor) -> Any:
        """Begin a sum, and its time on the link."""
        sum = self._group.begin_sum(tensor)
        if tensor.nbytes < _LAYER_BYTES:
            return sum
        self._is_free_at_s = max(self._is_free_at_s, time.monotonic()) + self._bucket_s
        is_over_at_s = self._is_free_at_s

        def finish() -> None:
            sum.finish()
            time.sleep(max(0.0, is_over_at_s - time.monotonic()))

        return replace(
            sum,
            is_over=lambda: sum.is_over() and time.monotonic() >= is_over_at_s,
            finish=finish,
        )


class Wait(nn.Module):
    """Simulates a layer: takes a fixed time forward, and twice that backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_LAYER_BYTES // 4))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and return the input."""
        found: Tensor = _Wait.apply(x, self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return found


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.like, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, torch.zeros_like(ctx.like), None
