"""The model and stages for the tests of pipelines in a DeviceMesh, on four ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from procpipe import Stage
from procpipe.job.grid import Grid
from procpipe.job.start import Meeting
from procpipe.job.world import World
from tests.dist.stages import assert_same, failing_all
from tests.dist.test_replicas import TOLERANCE


class Block(nn.Module):
    """Two linear layers beside a residual connection."""

    def __init__(self, size):
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, input):
        return input + self.down(torch.tanh(self.up(input)))


def make_model():
    """Make six layers: token numbers to classes, as in test_replicas.py."""
    torch.manual_seed(1)
    layers = nn.Embedding(7, 6), Block(6), nn.Tanh(), Block(6), nn.LayerNorm(6), nn.Linear(6, 7)
    return nn.Sequential(*layers).double()


@contextmanager
def process_group(bare: Any) -> Iterator[None]:
    """Make torch's default process group, with all ranks of the run."""
    store = dist.PrefixStore("default group", bare.store)
    dist.init_process_group("gloo", store=store, rank=bare.rank, world_size=bare.num_ranks)
    try:
        # gloo returns when this rank is connected. If this one left now, another could still be
        # connecting to it: "Connection closed by peer" there, and the next group hangs, since a
        # group that is not made counts in torch's names of groups (torch 2.13).
        dist.barrier()
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def mesh_of(bare: Any, *names: str) -> Iterator[DeviceMesh]:
    """Make torch's default process group, with all ranks of the run, and a mesh of 2 x 2."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of torch, about views
    with process_group(bare):
        yield init_device_mesh("cpu", (2, bare.num_ranks // 2), mesh_dim_names=names)


def stage_in(bare, mesh, name, model, balance, **options):
    """Return a stage of the pipeline that this rank is in."""
    ranks = tuple(mesh["pp"].mesh.tolist())
    world = World(
        Grid(ranks.index(bare.rank), len(ranks), numbers=ranks),
        [bare.devices[rank] for rank in ranks],
        Meeting(f"{bare.name}/{name} {ranks}"),
        timeout_s=bare.timeout_s,
    )
    return Stage(copy.deepcopy(model), balance, world=world, **options)


@contextmanager
def sharded(bare, mesh, name, plain, balance, fsdp=None, **options):
    """Yield a stage in which FSDP shards each layer, with options, and close it."""
    stage = stage_in(bare, mesh, name, plain, balance, **options)
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"], **fsdp or {})
    with failing_all(stage, name):
        yield stage


def whole(tensor):
    """Return all of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(stage, plain, what, tolerance=TOLERANCE):
    expected = dict(plain.named_parameters())
    for name, parameter in stage.named_parameters():
        found = None if parameter.grad is None else whole(parameter.grad)
        assert_same(found, expected[name].grad, f"{what} gradient of {name}", tolerance)


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
