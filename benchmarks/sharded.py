"""Two stages times two data-parallel ranks: replicas, FSDP2 in a mesh, and torch's own pipelining.

    procpipe, replicas=2           gradients added up in buckets
    procpipe and FSDP2             fully_shard of the layers, gathered and reduced once a step
    torch pipelining and FSDP2     the same layers and calls with PipelineStage

All train the same transformer on the same mini-batches: losses of the first step are compared.
The functions below are the whole of what a user writes for each; their lines are counted.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.report import OF_TORCH, Report, Table
from benchmarks.rounds import Times, launch, measure, ratio
from procpipe import Stage

_TOKENS, _WORDS, _WIDTH, _CHUNKS = 64, 512, 128, 4

#: Samples of a mini-batch, of all data-parallel ranks.
_BATCH = 32

_REPLICAS, _OURS, _TORCH = "procpipe, replicas", "procpipe, FSDP2", "torch pipelining, FSDP2"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps a turn")


def run(options: argparse.Namespace) -> Report:
    settings = {name: getattr(options, name) for name in ("blocks", "rounds", "steps")}
    times: Times = launch("benchmarks.sharded:measure_all", 4, **settings)
    return Report(
        "sharded",
        [tabulate(times, options.blocks)],
        times,
        settings,
        ratios={
            "2 stages x 2 replicas, of torch with FSDP2": {
                OF_TORCH: ratio(times[_REPLICAS], times[_TORCH])
            },
            "2 stages x 2 ranks of FSDP2": {OF_TORCH: ratio(times[_OURS], times[_TORCH])},
        },
    )


def tabulate(times: Times, blocks: int) -> Table:
    """Lay out the lines that a user writes, and times."""
    rows: list[list[Any]] = [
        [name, num_lines(MAKERS[name]), statistics.median(s) * 1e3, ratio(s, times[_TORCH])]
        for name, s in times.items()
    ]
    return Table(
        f"sharded: a transformer of {blocks} blocks of width {_WIDTH}, 2 stages x 2 data-parallel "
        f"ranks, {_BATCH} x {_TOKENS} tokens, {_CHUNKS} micro-batches a rank, 1F1B",
        ["", "lines", "ms a step", f"of {_TORCH}"],
        rows,
        ["d", ".1f", ".2f"],
        ["lines: statements of the user's script from the model to the end of a step"],
    )


def num_lines(function: Callable[..., Any]) -> int:
    """Count a function's statements, those inside of others included."""
    (tree,) = ast.parse(inspect.getsource(function)).body
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - 1


def measure_all(blocks: int, rounds: int, steps: int) -> Times:
    """Measure each contender; every rank calls it."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of 3-D inputs
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_WORDS, (_BATCH, _TOKENS + 1), generator=generator)
    data = tokens[:, :-1], tokens[:, 1:]
    trainers = {name: make(blocks, *data) for name, make in MAKERS.items()}
    losses = torch.tensor([float(train()) for train in trainers.values()])
    dist.all_reduce(losses, op=dist.ReduceOp.MAX)
    torch.testing.assert_close(losses, losses[:1].expand_as(losses))
    return measure(trainers, num_rounds=rounds, num_steps=steps)


def replicas(blocks: int, input: Tensor, target: Tensor) -> Callable[[], Tensor]:
    stage = Stage(
        model_of(blocks), replicas=2, chunks=_CHUNKS, schedule="1f1b", loss_fn=loss_of,
        checkpoint="never", balance=balance_of(blocks),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(stage.parameters())
    input, target = (part.chunk(2)[stage.replica] for part in (input, target))

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = stage.step(input, target)
        stage.clip_grad_norm_(1.0)
        optimizer.step()
        return loss

    return train


def ours(blocks: int, input: Tensor, target: Tensor) -> Callable[[], Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage = Stage(
        model_of(blocks), mesh=mesh["pp"], chunks=_CHUNKS, schedule="1f1b", loss_fn=loss_of,
        checkpoint="never", balance=balance_of(blocks),
    )  # fmt: skip
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(stage.parameters())
    input, target = (part.chunk(2)[mesh["dp"].get_local_rank()] for part in (input, target))

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = stage.step(input, target)
        stage.clip_grad_norm_(1.0)
        optimizer.step()
        return mean_over(mesh["dp"], loss)

    return train


def torchs(blocks: int, input: Tensor, target: Tensor) -> Callable[[], Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp, dp = mesh["pp"], mesh["dp"]
    first = balance_of(blocks)[0]
    model = model_of(blocks)
    part: Any = model[:first] if pp.get_local_rank() == 0 else model[first:]
    for layer in part:
        fully_shard(layer, mesh=dp, reshard_after_forward=False)
    fully_shard(part, mesh=dp, reshard_after_forward=False)
    device = torch.device("cpu")
    stage = PipelineStage(part, pp.get_local_rank(), pp.size(), device, group=pp.get_group())
    schedule = Schedule1F1B(stage, n_microbatches=_CHUNKS, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters())
    input, target = (part.chunk(2)[dp.get_local_rank()] for part in (input, target))

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        if pp.get_local_rank() == 0:
            schedule.step(input)
        else:
            losses: list[Tensor] = []
            schedule.step(target=target, losses=losses)
            loss = torch.stack(losses).mean().detach()
        norms = torch.stack([
            p.grad.full_tensor().norm() for p in part.parameters() if p.grad is not None
        ])  # fmt: skip
        total = norms.square().sum()
        dist.all_reduce(total, group=pp.get_group())
        scale = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in part.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        optimizer.step()
        return mean_over(dp, loss)

    return train


MAKERS = {_REPLICAS: replicas, _OURS: ours, _TORCH: torchs}


def mean_over(mesh: DeviceMesh, loss: Tensor) -> Tensor:
    """Return the mean of a loss over the data-parallel ranks, as replicas return it."""
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.get_group())
    return mean / mesh.size()


def balance_of(blocks: int) -> list[int]:
    return [1 + blocks // 2, blocks - blocks // 2 + 1]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def model_of(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Block() for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(_WORDS, _WIDTH), *layers, nn.Linear(_WIDTH, _WORDS))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.mixed = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.joined = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run it on ``(batch, time, width)``."""
        heads = self.mixed(self.norm1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        return torch.add(x, self.mlp(self.norm2(x)))
