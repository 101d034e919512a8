"""Skip tensors over real processes: sent once and directly, and kept for as long as needed.

That results are the plain model's: tests/fuzz, tests/dist/test_parity.py.
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
from procpipe.skip import pop, skippable, stash
from tests.dist.stages import assert_same
from tests.dist.test_parity import Pop, Stash

pytestmark = pytest.mark.on_gpus


@skippable(stash={"skip": 2})
class StashForTwo(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", torch.tanh(x))
        return x


@skippable(stash=["skip"])
class StashSome(nn.Module):
    """Stashes a tensor whose length depends on the data, or None."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        length = int(x[0, 0].item()) % 3
        yield stash("skip", x[:, :length].sum(1) if length else None)
        return x


@skippable(pop=["skip"])
class PopSome(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x if skip is None else x + skip[:, None]


def check_changing_skips(world: World, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        first = nn.Linear(4, 4)
        return nn.Sequential(first, nn.Identity(), StashSome(), nn.Identity(), PopSome()).double()

    x = torch.arange(24, dtype=torch.float64).reshape(6, 4) * 3
    plain = build()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(1.0)
    stage = Stage(build(), [2, 1, 2], chunks=6, checkpoint=mode, world=world)
    stage.load_state_dict(plain.state_dict())
    expected = torch.cat([plain(part) for part in x.chunk(6)])
    output = stage(x)
    assert_same(stage.fetch(output), expected.detach(), "output")
    expected.sum().backward()
    output.sum().backward()
    for name, parameter in stage.named_parameters():
        assert_same(parameter.grad, plain.get_parameter(name).grad, name, 1e-7)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_skip_may_change_its_shape_or_be_none(ranks: Any, mode: str) -> None:
    ranks(3).run(check_changing_skips, mode).values()


def count_traffic(world: World, mode: str) -> tuple[dict[str, int], dict[str, int]]:
    """One stash on stage 0, popped on the last; the skip is 3 times as wide as the activation."""

    @skippable(stash=["wide"])
    class StashWide(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            yield stash("wide", torch.cat([x, x, x], 1))
            return x

    @skippable(pop=["wide"])
    class PopWide(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            wide = yield pop("wide")
            return x + wide.sum(1, keepdim=True)

    layers = [nn.Linear(4, 4), StashWide(), *[nn.Linear(4, 4) for _ in range(4)], PopWide()]
    stage = Stage(
        nn.Sequential(*layers),
        [2, 2, 2, 1],
        chunks=4,
        checkpoint=mode,
        loss_fn=F.mse_loss,
        world=world,
    )
    stage.step(torch.randn(8, 4), torch.randn(8, 4))
    statistics = stage.statistics()
    return statistics.sent_bytes, statistics.num_messages


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_skip_tensor_is_sent_once_and_directly(ranks: Any, mode: str) -> None:
    of_ranks = ranks(4).run(count_traffic, mode).values()
    width = 4 * 8 * 4  # floats of 4 bytes, 8 samples, 4 features
    for rank, (sent, messages) in enumerate(of_ranks):
        is_first, is_last = rank == 0, rank == 3
        assert sent.get("skip", 0) == (3 * width if is_first else 0)
        assert sent.get("skip gradient", 0) == (3 * width if is_last else 0)
        assert sent.get("activation", 0) == (0 if is_last else width)
        assert sent.get("gradient", 0) == (0 if is_first else width)
        assert messages.get("skip", 0) == (4 if is_first else 0)


@skippable(pop=["skip"])
class PopInPlace(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip.add_(1)


def change_a_popped_skip(world: World) -> None:
    layers = [nn.Linear(4, 4), StashForTwo(), PopInPlace(), nn.Linear(4, 4), Pop()]
    stage = Stage(
        nn.Sequential(*layers), [2, 2, 1], checkpoint="always", loss_fn=F.mse_loss, world=world
    )
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
    layers = [nn.Linear(4, 4), OnlyInTraining(Stash()), OnlyInTraining(Pop())]
    plain = nn.Sequential(*layers).eval()
    x = torch.ones(4, 4)
    expected = plain(x).detach()
    stage = Stage(plain, [2, 1], world=world)
    assert_same(stage.fetch(stage(x)), expected, "output")


def test_a_skip_may_be_left_out_at_both_ends(ranks: Any) -> None:
    ranks(2).run(check_skips_that_are_left_out).values()
