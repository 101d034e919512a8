"""A GPT in bf16 autocast, compared with one process, with peers and with its own plan.

    profile the layers on rank 0 ── balance ── simulated step, and bytes of each stage
    build each contender in turn ── two steps, peak of the allocator on each rank
    rounds of all contenders     ── seconds a step

The prediction is for one GPU a stage. Where stages share a GPU, a step cannot be shorter than the
tasks of all stages one after the other, which the table shows beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.child import Recorder
from benchmarks.gpu.measures import gathered, median_ms
from benchmarks.rounds import Step, measure, spread
from examples.models.gpt import gpt as build
from procpipe import Stage
from procpipe.balance import profile_layers
from procpipe.job.world import World
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.planner import simulate
from procpipe.planner.divide import divide

_SCHEDULE, _MODE = "1f1b", "never"


def gpt(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    sizes: Sequence[int],
    micro_batch: int,
    num_micro_batches: int,
    num_rounds: int,
    with_peers: bool = False,
) -> None:
    """Measure steps and peaks; every rank calls it.

    Args:
        record: records a finding.
        devices: one a rank.
        transport: procpipe's.
        sizes: words, blocks, width, heads and context of the model.
        micro_batch: samples in each micro-batch.
        num_micro_batches: how many there are in a mini-batch.
        num_rounds: how often each contender gets its turn.
        with_peers: whether ``torch.distributed.pipelining`` takes part, and not one process.
    """
    rank, m, n = dist.get_rank(), num_micro_batches, len(devices)
    device = torch.device(devices[rank])
    torch.cuda.set_device(device)
    words, context = sizes[0], sizes[-1]
    torch.manual_seed(1)
    tokens = torch.randint(words, (micro_batch * m, context + 1)).to(device)
    input, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        with device:
            return build(*sizes)

    planned = None
    if rank == 0:
        planned = _planned(model(), input[:micro_batch], target[:micro_batch], m, n)
    plan: dict[str, Any] = gathered(planned)[0]
    what = _described(sizes, f"{m} micro-batches of {micro_batch}", n)
    stages: list[Stage] = []

    def ours() -> Step:
        World.transport = transport
        stage = Stage(
            model(), plan["balance"], chunks=m, devices=devices,
            schedule=_SCHEDULE, checkpoint=_MODE, loss_fn=loss_of, timeout_s=60.0,
        )  # fmt: skip
        stages.append(stage)
        return lambda: stage.step(input, target)

    makers = {f"procpipe {_SCHEDULE}": ours}
    if with_peers:
        makers["torch Schedule1F1B"] = lambda: _peer(model(), plan["balance"], m, input, target)
    else:
        makers["one process"] = lambda: _one_process(model, m, input, target)
    steps = {}
    cells: dict[str, Any]
    for name, make in makers.items():
        steps[name], peaks, losses = _first_steps(make)
        loss = next(loss for loss in losses if loss is not None)
        cells = {"ms a step": None, "ratio": None, "loss": f"{loss:.4f}"}
        record("gpt", name, cells | _peaks(peaks), what)
    if not with_peers:
        cells = {"ms a step": plan["step_s"] * 1e3, **_peaks(plan["peak_bytes"])}
        record("gpt", f"predicted {_SCHEDULE}, a GPU a stage", cells, f"balance {plan['balance']}")
        name = "predicted, all tasks in turn on one GPU"
        record("gpt", name, {"ms a step": plan["all_tasks_s"] * 1e3})
    times = measure(steps, num_rounds=num_rounds, num_steps=1)
    against = list(times)[-1]
    for name, seconds in times.items():
        ratio = f"{spread(seconds, times[against])} of {against}"
        record("gpt", name, {"ms a step": median_ms(seconds), "ratio": ratio}, times=seconds)
    stages[0].close()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Compute the mean cross entropy over all tokens."""
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def _planned(model: nn.Sequential, x: Tensor, y: Tensor, m: int, n: int) -> dict[str, Any]:
    """Profile the layers, divide them, and predict a step and each stage's bytes."""
    with torch.autocast("cuda", torch.bfloat16):
        layers = profile_layers(model, x, target=y, loss_fn=loss_of, timeout=2.0)
    balance = divide(layers.layer_seconds(), n)
    costs = layers.costs(balance)
    timeline = simulate(SCHEDULES[_SCHEDULE].plan(m, tuple(range(n)), recomputed(_MODE, m)), costs)
    static = layers.static_bytes(balance, range(n), 0.0)
    return {
        "balance": list(balance),
        "step_s": timeline.total_s,
        "all_tasks_s": sum(timeline.busy_s(stage) for stage in range(n)),
        "peak_bytes": [static[stage] + timeline.peak_bytes(stage) for stage in range(n)],
    }


def _first_steps(make: Callable[[], Step]) -> tuple[Step, list[int], list[float | None]]:
    """Build a contender and run two steps; return its step, and peak and loss on each rank."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    made = make()
    torch.cuda.reset_peak_memory_stats()

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = made()
        torch.cuda.synchronize()
        return loss

    loss = step()
    step()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    of_all = gathered((peak_bytes, None if loss is None else float(loss)))
    return step, [peak for peak, _ in of_all], [loss for _, loss in of_all]


def _peaks(peak_bytes: Sequence[float]) -> dict[str, float]:
    return {f"MiB, rank {rank}": peak / 2**20 for rank, peak in enumerate(peak_bytes)}


def _one_process(model: Callable[[], nn.Sequential], m: int, input: Tensor, target: Tensor) -> Step:
    """Train on rank 0, micro-batch by micro-batch."""
    if dist.get_rank() != 0:
        return lambda: None
    plain = model()

    def step() -> Tensor:
        losses = []
        for x, y in zip(input.chunk(m), target.chunk(m), strict=True):
            losses.append(loss_of(plain(x), y) / m)
            losses[-1].backward()
        return torch.stack(losses).sum().detach()

    return step


def _peer(
    model: nn.Sequential, balance: Sequence[int], m: int, input: Tensor, target: Tensor
) -> Step:
    """Make the step of ``torch.distributed.pipelining`` with the same splits."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, n = dist.get_rank(), dist.get_world_size()
    first = sum(balance[:rank])
    layers = nn.Sequential(*list(model)[first : first + balance[rank]])
    stage = PipelineStage(layers, rank, n, input.device)
    schedule = Schedule1F1B(stage, n_microbatches=m, loss_fn=loss_of)
    if rank < n - 1:
        return lambda: schedule.step(*[input] * (rank == 0))

    def step() -> Tensor:
        losses: list[Tensor] = []
        schedule.step(target=target, losses=losses)
        return torch.stack(losses).mean().detach()

    return step


def _described(sizes: Sequence[int], mini_batch: str, n: int) -> str:
    with torch.device("meta"):
        millions = sum(parameter.numel() for parameter in build(*sizes).parameters()) / 1e6
    words, blocks, width, heads, context = sizes
    return (
        f"GPT of {millions:,.2f} M parameters ({blocks} blocks, width {width}, {heads} heads, "
        f"{words} words), bf16 autocast, {mini_batch} x {context} tokens, {n} stages"
    )
