"""torchgpipe 0.0.7, procpipe's model; in one process, all stages on its CPU.

It gives all CPU devices one worker thread, so on CPUs its stages run one after the other: a
reference for results and memory, not for speed.

Source: https://github.com/kakaobrain/torchgpipe
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rounds import Step
from benchmarks.workloads import Job

#: The note under every table with a row of torchgpipe.
NOTE = "torchgpipe has one worker for all CPU devices: a reference for results, not for speed"


def why_not() -> str | None:
    """Return why torchgpipe cannot be run, or None."""
    try:
        import torchgpipe  # noqa: F401
    except ImportError:
        return "torchgpipe is not installed (pip install 'procpipe[peers]')"
    return None


def torchgpipe(job: Job, checkpoint: str = "never") -> Step:
    """Train on rank 0."""
    balance = job.balance(job.num_stages)
    if dist.get_rank() != 0:
        return lambda: None
    from torchgpipe import GPipe

    model = GPipe(
        _with_its_skips(job.model()) if job.workload.has_skips else job.model(),
        balance,
        devices=["cpu"] * job.num_stages,
        chunks=job.num_micro_batches,
        checkpoint=checkpoint,
    )
    input, target, loss_fn = job.input, job.target, job.workload.loss_fn
    return lambda: loss_fn(model(input), target).backward()


def _with_its_skips(model: nn.Sequential) -> nn.Sequential:
    """Give the U-Net torchgpipe's skip layers in the place of procpipe's."""
    from torchgpipe.skip import Namespace, pop, skippable, stash

    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            yield stash("skip", input)
            return input

    @skippable(pop=["skip"])
    class PopConcat(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            skip = yield pop("skip")
            return torch.cat((skip, input), dim=1)

    levels: list[Any] = []
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in model.named_children():
        if name.endswith("_stash"):
            levels.append(Namespace())
            layer = Stash().isolate(levels[-1])  # type: ignore[operator]
        elif name.endswith("_pop"):
            layer = PopConcat().isolate(levels.pop())  # type: ignore[operator]
        layers[name] = layer
    return nn.Sequential(layers)
