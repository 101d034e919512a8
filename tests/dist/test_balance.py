"""Balances that rank 0 finds and all ranks use."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from procpipe.job.world import World
from tests.balance.test_by_shapes import Repeated

pytestmark = pytest.mark.on_gpus


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Repeated(times) for times in (1, 1, 1, 1, 40, 1)])


def find(world: World, by: str) -> tuple[list[int], float]:
    whole = model()
    sample = torch.randn(32, 64) if world.rank == 0 else None
    random_state = torch.get_rng_state()
    stage = Stage(
        whole, by, sample=sample, chunks=4, loss_fn=F.mse_loss, checkpoint="always", world=world
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in stage.parameters())
    x = torch.linspace(0, 1, 8 * 64).reshape(8, 64)
    return stage.balance, float(stage.step(x, x))


def test_the_long_layer_gets_a_stage_of_its_own(ranks: Any) -> None:
    for by in ("time", "size"):
        found = ranks(3).run(find, by).values()
        balances = [balance for balance, _ in found]
        assert balances == [[4, 1, 1]] * 3, by
        assert len({loss for _, loss in found}) == 1


def estimate(world: World, schedule: str, num_layers: int, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = [Repeated(times) for times in (1, 1, 1, 1, 40, 1)][:num_layers]
    x = torch.linspace(0, 1, 8 * 64).reshape(8, 64)
    options |= {"schedule": schedule, "loss_fn": F.mse_loss, "sample": x}
    with pytest.MonkeyPatch.context() as patch:
        told = io.StringIO()
        patch.setattr("sys.stderr", told)
        stage = Stage(nn.Sequential(*layers), world=world, **options)
    loss = float(stage.step(x, x))
    return stage.balance, told.getvalue(), loss


def test_a_balance_that_every_rank_estimates(ranks: Any) -> None:
    for schedule, balance in (("gpipe", [4, 2]), ("zb-v", [2, 2, 1, 1])):
        (first, told, loss), (second, nothing, same) = ranks(2).run(estimate, schedule, 6).values()
        assert first == second == balance, schedule
        assert told.startswith(f"procpipe: balance {balance}, by parameters and estimated work (")
        assert (told.count("\n"), nothing) == (1, "")
        assert loss == same
    for failure in ranks(2).run(estimate, "gpipe", 1).errors():
        assert "cannot divide 1 layer into 2 partitions" in failure.text


def test_every_rank_reports_what_rank_0_lacks(ranks: Any) -> None:
    for by, words in (("time", "balance='time' needs a sample"), ("weight", "balance is 'weight'")):
        for failure in ranks(2).run(find_without_sample, by).errors():
            assert failure.type in ("BalanceError", "RemoteStageError")
            assert words in failure.text


def find_without_sample(world: World, by: str) -> None:
    Stage(model(), by, world=world)


def find_on_rank_1_alone(world: World) -> None:
    balance = "time" if world.rank == 1 else [3, 3]
    stage = Stage(model(), balance, sample=torch.randn(4, 64), loss_fn=F.mse_loss, world=world)
    stage.step(torch.randn(4, 64), torch.randn(4, 64))


def test_only_one_rank_requests_a_balance_from_rank_0(ranks: Any) -> None:
    words = "rank 1 has arguments by which rank 0 finds the balance, but rank 0 has not"
    errors = ranks(2).run(find_on_rank_1_alone, timeout_s=15).errors()
    assert [error.type for error in errors] == ["ValueError", "RemoteStageError"]
    assert all(words in error.text for error in errors)
