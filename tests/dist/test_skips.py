"""Skip tensors over real processes: changed by a layer that pops them, or left out at both ends.

That results are the plain model's: tests/fuzz, tests/dist/test_parity.py. That they are sent once:
tests/dist/test_boundaries.py.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage
from procpipe.job.world import World
from procpipe.skip import pop, skippable
from tests.dist.stages import assert_same
from tests.skip.layers import popper, stasher

pytestmark = pytest.mark.on_gpus


@skippable(pop=["skip"])
class PopInPlace(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip.add_(1)


def change_a_popped_skip(world: World) -> None:
    layers = [nn.Linear(4, 4), stasher("skip", times=2), PopInPlace(), nn.Linear(4, 4)]
    stage = Stage(
        nn.Sequential(*layers, popper("skip")), [2, 2, 1], checkpoint="always", loss_fn=F.mse_loss,
        world=world,
    )  # fmt: skip
    stage.step(torch.randn(4, 4), torch.randn(4, 4))


def test_an_error_names_the_layer_that_changes_a_popped_skip_tensor(ranks: Any) -> None:
    """A recomputation would begin with another value."""
    outcomes = ranks(3).run(change_a_popped_skip)
    assert outcomes[1].error.type == "RecomputeError"
    assert "layer '2' (PopInPlace) changed" in outcomes[1].error.text


class OnlyInTraining(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.training else x


def check_skips_that_are_left_out(world: World) -> None:
    layers = [nn.Linear(4, 4), OnlyInTraining(stasher("skip")), OnlyInTraining(popper("skip"))]
    plain = nn.Sequential(*layers).eval()
    x = torch.ones(4, 4)
    expected = plain(x).detach()
    stage = Stage(plain, [2, 1], world=world)
    assert_same(stage.fetch(stage(x)), expected, "output")


def test_a_skip_may_be_left_out_at_both_ends(ranks: Any) -> None:
    ranks(2).run(check_skips_that_are_left_out).values()
