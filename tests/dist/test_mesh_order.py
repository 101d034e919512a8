"""Pipelines that share layers reduce them in one order, however their passes differ.

In another order gradients would be those of other layers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.dist.meshes import Block, assert_same_gradients, make_model, mesh_of, sharded, stage_in
from tests.dist.stages import assert_same, failing_all
from tests.dist.test_replicas import TOLERANCE, counting_loss, make_batch, mean_loss, weighted_loss


class Shortcut(nn.Module):
    """Two linear layers; for an input of zeros, no gradient passes from one to the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, input):
        middle = torch.tanh(self.first(input))
        is_cut = not input.count_nonzero()
        return middle + self.second(middle.detach() if is_cut else middle)


class Twice(nn.Module):
    """A linear layer, which is applied twice to an input of zeros."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, input):
        output = torch.tanh(self.first(input))
        return output if input.count_nonzero() else self.first(output)


class Barrier(Block):
    """A block that passes no gradient on for an input of zeros."""

    def __init__(self):
        super().__init__(6)

    def forward(self, input):
        return super().forward(input if input.count_nonzero() else input.detach())


def shard(layer, mesh):
    """Shard a layer, or the modules of a shortcut and of one applied twice."""
    modules = [module for module in layer.children() if isinstance(layer, (Shortcut, Twice))]
    for module in modules or [layer]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)


def check_differing(bare, mesh, layer, zeros_in):
    """Train where the last micro-batch of one pipeline goes another way through the layers."""
    torch.manual_seed(7)
    second, plain = layer().double(), make_model()
    plain[1] = second
    with torch.no_grad():
        plain[0].weight[0] = 0  # so token 0 is a vector of zeros
    name = f"{layer.__name__} {zeros_in}"
    options = {"chunks": 3, "schedule": "1f1b", "checkpoint": "never", "loss_fn": mean_loss}
    stage = stage_in(bare, mesh, name, plain, [4, 2], **options)
    for each in stage:
        shard(each, mesh["dp"])
    dp = mesh["dp"].get_local_rank()
    with failing_all(stage, name):
        for step in range(2):  # in the first one it is not known what loss_fn returns
            parts = [make_batch(6, 2 * step + k) for k in range(2)]
            parts[zeros_in][0][4:] = 0
            for input, target in parts:
                for piece, its_target in zip(input.chunk(3), target.chunk(3), strict=True):
                    (mean_loss(plain(piece), its_target) / 6).backward()
            stage.step(*parts[dp])
            assert_same_gradients(stage, plain, f"{name} {step}")


def check_numbers(bare, mesh, schedule, balance, sizes, *, counts=False):
    """Train where pipelines have mini-batches of other sizes, or one knows what it counts."""
    plain, name = make_model(), f"{schedule} {sizes} {counts}"
    options = {"chunks": 3, "schedule": schedule, "checkpoint": "never"}
    options["loss_fn"] = counting_loss if counts else mean_loss
    plain_loss, dp = weighted_loss if counts else mean_loss, mesh["dp"].get_local_rank()
    with sharded(bare, mesh, name, plain, balance, **options) as stage:
        for step in range(2):
            parts = [make_batch(size, 3 * step + k) for k, size in enumerate(sizes)]
            losses = [plain_loss(plain(input), target) for input, target in parts]
            torch.stack(losses).mean().backward()
            is_known = counts and dp == 0
            known = {"total_weight": float((parts[0][1] > 0).sum())} if is_known else {}
            found = stage.step(*parts[dp], **known)
            assert_same(found, losses[dp].detach(), f"loss {step}", TOLERANCE)
            assert_same_gradients(stage, plain, f"{name} {step}")


def train_differing_pipelines(bare):
    with mesh_of(bare, "dp", "pp") as mesh:
        for layer in (Barrier, Shortcut, Twice):
            for zeros_in in (0, 1):
                check_differing(bare, mesh, layer, zeros_in)
        check_numbers(bare, mesh, "1f1b", [3, 3], (6, 1))
        check_numbers(bare, mesh, "gpipe", [3, 3], (2, 5))
        check_numbers(bare, mesh, "interleaved", [1, 1, 2, 2], (6, 1))
        check_numbers(bare, mesh, "1f1b", [3, 3], (6, 6), counts=True)


def test_pipelines_reduce_in_one_order_however_their_passes_differ(ranks):
    assert ranks(4).run(train_differing_pipelines, world=False).values() == [None] * 4
