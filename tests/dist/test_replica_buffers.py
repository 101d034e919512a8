"""Buffers that layers change in training: equal on all replicas, or a cache of each of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import RemoteStageError, Stage
from tests.dist.stages import assert_same, stage_of, world_of
from tests.dist.test_replicas import TOLERANCE

pytestmark = pytest.mark.on_gpus


def ones(*size: int) -> Tensor:
    return torch.ones(*size, dtype=torch.float64)


class Places(nn.Module):
    """Keeps the numbers of the longest input's columns."""

    places: Tensor

    def __init__(self, *, persistent: bool):
        super().__init__()
        self.register_buffer("places", torch.zeros(0), persistent=persistent)

    def forward(self, input):
        length = input.shape[1]
        if len(self.places) < length:
            self.places = torch.arange(length).to(input)
        return (input * self.places[:length]).sum(1, keepdim=True)


class Late(nn.Module):
    """Registers its buffer in the first call."""

    twos: Tensor

    def forward(self, input):
        if not hasattr(self, "twos"):
            self.register_buffer("twos", torch.full_like(input[0], 2), persistent=False)
        return input * self.twos


def check_caches(bare):
    torch.manual_seed(1)
    layers = Places(persistent=False), nn.Linear(1, 2)
    for layer, sizes in (
        (nn.Identity(), ((4, 3), (1, 5), (4, 4), (4, 6))),
        (Late(), ((1, 3), (4, 3))),
    ):
        more = 0 if isinstance(layer, Late) else 1  # of replica 1, whose buffer is then longer
        plain = nn.Sequential(layer, *layers).double()
        name = type(layer).__name__
        with stage_of(bare, name, plain, [2, 1], replicas=2, loss_fn=F.mse_loss) as stage:
            for size, length in sizes:
                target = ones(size, 2)
                of_both = [ones(size, length + more * replica) for replica in range(2)]
                losses = [F.mse_loss(plain(input), target).detach() for input in of_both]
                expected = (losses[0] + losses[1]) / 2
                found = stage.step(of_both[stage.replica], target)
                assert_same(found, expected, f"{name}, {size} of {length}", TOLERANCE)


def check_other_shape(bare):
    model = nn.Sequential(Places(persistent=True), nn.Linear(1, 2)).double()
    stage = Stage(model, [1, 1], replicas=2, loss_fn=F.mse_loss, world=world_of(bare, "shape"))
    stage.step(ones(4, 3), ones(4, 2))

    def step_twice():  # where the first raises on one stage only, the others learn of it later
        for _ in range(2):
            stage.step(ones(1, 4 + stage.replica), ones(1, 2))

    with pytest.raises((RuntimeError, RemoteStageError)) as caught:
        step_twice()
    assert "the buffer 'places' of a Places is " in str(caught.value)


def check_other_modes(bare):
    """A replica whose layer is in eval mode gives no buffers of it; gloo would not notice."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    options = {"replicas": 4, "loss_fn": F.mse_loss}

    def step_in_other_modes():
        with stage_of(bare, "modes", model, [2], **options) as stage:
            stage[0].train(stage.replica == 0)
            stage.step(ones(4, 3), ones(4, 3))

    words = "one replica has 3 saved buffers in modules that train, and another 6"
    with pytest.raises((RuntimeError, RemoteStageError), match=words):
        step_in_other_modes()


@pytest.mark.parametrize(
    "check",
    [check_caches, check_other_shape, check_other_modes],
)
def test_buffers_of_replicas(ranks, check):
    ranks(4).run(check, world=False).values()
