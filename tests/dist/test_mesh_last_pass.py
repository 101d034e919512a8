"""Layers that FSDP reduces one by one within the last backward pass, and where it may not.

Pipelines that share layers must reduce them in one order, also where one of them reduces a layer
in the pass and the other one after it. In another order gradients would be those of other layers.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.meshes import (
    TOLERANCE,
    Block,
    assert_same_gradients,
    counting_loss,
    failing_all,
    make_batch,
    make_model,
    mean_loss,
    mesh_of,
    stage_in,
    weighted_loss,
)
from tests.dist.stages import assert_same

#: What happens on this rank: "2" where layer 2 goes backward, "reduce" where a reduction begins.
EVENTS: list[str] = []


class Note(torch.autograd.Function):
    """Passes a tensor on, and notes when its gradient comes back."""

    @staticmethod
    def forward(ctx, name, input):
        ctx.name = name
        return input.clone()

    @staticmethod
    def backward(ctx, gradient):
        EVENTS.append(ctx.name)
        return None, gradient


class Noted(nn.Linear):
    """A linear layer that notes when it goes backward."""

    def __init__(self, name):
        super().__init__(3, 3)
        self.name = name

    def forward(self, input):
        return Note.apply(self.name, super().forward(input))


class Outer(Noted):
    """A layer with one inside that is sharded by itself."""

    def __init__(self, name):
        super().__init__(name)
        self.inner = nn.Linear(3, 3)

    def forward(self, input):
        return super().forward(self.inner(input))


class Reductions(TorchDispatchMode):
    """Notes each reduction that begins."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "reduce_scatter" in str(func):
            EVENTS.append("reduce")
        return func(*args, **kwargs or {})


def square(output):
    return output.square().mean()


ONE_BY_ONE = ["3", "reduce", "2", "reduce", "1", "reduce", "0", "reduce"]
AFTER = ["3", "2", "1", "0", "reduce", "reduce", "reduce", "reduce"]

#: By name: schedule, mode, what layer 1 is, the events of the last micro-batch.
ORDERS = {
    "plain": ("1f1b", "never", Noted("1"), ONE_BY_ONE),
    "first ones recomputed": ("1f1b", "except_last", Noted("1"), ONE_BY_ONE),
    "recomputed": ("1f1b", "always", Noted("1"), AFTER),
    "in two": ("zb-h1", "never", Noted("1"), AFTER),
    "module inside": (
        "1f1b",
        "never",
        Outer("1"),
        ["3", "reduce", "2", "reduce", "1", "0", "reduce", "reduce", "reduce"],
    ),
}


def note_orders(bare):
    found = {}
    with mesh_of(bare, "dp", "pp") as mesh:
        for name, (schedule, mode, second, _) in ORDERS.items():
            model = nn.Sequential(Noted("0"), second, Noted("2"), Noted("3"), *map(Noted, "0123"))
            options = {"chunks": 3, "schedule": schedule, "checkpoint": mode, "loss_fn": square}
            stage = stage_in(bare, mesh, name, model, [4, 4], **options)
            for layer in stage:
                if isinstance(layer, Outer):
                    fully_shard(layer.inner, mesh=mesh["dp"], reshard_after_forward=False)
                fully_shard(layer, mesh=mesh["dp"])
            with failing_all(stage, name), Reductions():
                stage.step(torch.ones(3, 3))
                EVENTS.clear()
                stage.step(torch.ones(3, 3))
            found[name] = EVENTS.copy()
    return found


def test_a_layer_is_reduced_before_the_layer_before_it_goes_backward(ranks):
    for rank, found in enumerate(ranks(4).run(note_orders, world=False).values()):
        for name, (schedule, _, second, expected) in ORDERS.items():
            if (rank % 2 and isinstance(second, Outer)) or (rank % 2 == 0 and schedule == "zb-h1"):
                expected = ONE_BY_ONE  # without that layer; with B as the last task
            passes = ["3", "2", "1", "0"] * 2
            assert found[name] == [*passes, *expected], (rank, name)


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


def model_with(layer):
    """Make a model with another layer 1; token 0 is a vector of zeros there."""
    model = make_model()
    model[1] = layer.double()
    with torch.no_grad():
        model[0].weight[0] = 0
    return model


def shard(layer, mesh):
    """Shard a layer, or the modules of a shortcut and of one applied twice."""
    modules = [module for module in layer.children() if isinstance(layer, (Shortcut, Twice))]
    for module in modules or [layer]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)


def check_differing(bare, mesh, layer, zeros_in):
    """Train where the last micro-batch of one pipeline goes another way through the layers."""
    torch.manual_seed(7)
    plain = model_with(layer())
    name = f"{layer.__name__} {zeros_in}"
    options = {"chunks": 3, "schedule": "1f1b", "checkpoint": "never", "loss_fn": mean_loss}
    stage = stage_in(bare, mesh, name, plain, [4, 2], **options)
    for each in stage:
        shard(each, mesh["dp"])
    dp = mesh["dp"].get_local_rank()
    with failing_all(stage, name), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of torch, about views
        for step in range(2):  # in the first one it is not known what loss_fn returns
            parts = [make_batch(6, 2 * step + k) for k in range(2)]
            parts[zeros_in][0][4:] = 0
            for input, target in parts:
                for piece, its_target in zip(input.chunk(3), target.chunk(3), strict=True):
                    (mean_loss(plain(piece), its_target) / 6).backward()
            stage.step(*parts[dp])
            assert_same_gradients(stage, plain, f"{name} {step}")


def check_numbers(bare, mesh, schedule, balance, sizes):
    """Train where pipelines have mini-batches of other sizes."""
    plain, name = make_model(), f"{schedule} {sizes}"
    options = {"chunks": 3, "schedule": schedule, "checkpoint": "never", "loss_fn": mean_loss}
    stage = stage_in(bare, mesh, name, plain, balance, **options)
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"])
    with failing_all(stage, name):
        for step in range(2):
            parts = [make_batch(size, 3 * step + k) for k, size in enumerate(sizes)]
            losses = [mean_loss(plain(input), target) for input, target in parts]
            torch.stack(losses).mean().backward()
            stage.step(*parts[mesh["dp"].get_local_rank()])
            assert_same_gradients(stage, plain, f"{name} {step}")


def check_total_weight(bare, mesh):
    """Train where one pipeline is given what it counts, and the other counts."""
    plain = make_model()
    options = {"chunks": 3, "schedule": "1f1b", "checkpoint": "never", "loss_fn": counting_loss}
    stage = stage_in(bare, mesh, "total weight", plain, [3, 3], **options)
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"])
    dp = mesh["dp"].get_local_rank()
    parts = [make_batch(6, k + 1) for k in range(2)]
    with failing_all(stage, "total weight"):
        for step in range(2):
            losses = [weighted_loss(plain(input), target) for input, target in parts]
            torch.stack(losses).mean().backward()
            known = {} if dp else {"total_weight": float((parts[0][1] > 0).sum())}
            found = stage.step(*parts[dp], **known)
            assert_same(found, losses[dp].detach(), f"loss {step}", TOLERANCE)
            assert_same_gradients(stage, plain, f"total weight {step}")


def train_differing_pipelines(bare):
    with mesh_of(bare, "dp", "pp") as mesh:
        for layer in (Barrier, Shortcut, Twice):
            for zeros_in in (0, 1):
                check_differing(bare, mesh, layer, zeros_in)
        for sizes in ((6, 1), (2, 5)):
            check_numbers(bare, mesh, "1f1b", [3, 3], sizes)
            check_numbers(bare, mesh, "gpipe", [3, 3], sizes)
            check_numbers(bare, mesh, "interleaved", [1, 1, 2, 2], sizes)
        check_total_weight(bare, mesh)


def test_pipelines_reduce_in_one_order_however_their_passes_differ(ranks):
    assert ranks(4).run(train_differing_pipelines, world=False).values() == [None] * 4
