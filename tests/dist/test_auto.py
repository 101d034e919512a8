"""``schedule="auto"`` over real processes: equal to the plain model, within the memory limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import DeferredBatchNorm, MemoryLimitError, Stage
from tests.dist.stages import (
    assert_same,
    assert_same_gradients,
    assert_same_state,
    plain_step,
    stage_of,
    world_of,
    zero_grad,
)
from tests.dist.test_schedules import BALANCES, make_model

pytestmark = pytest.mark.on_gpus

#: Each plan sums the gradients of its micro-batches in its own order.
TOLERANCE = 1e-13


def data(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def check_parity(bare: Any, partitions_per_stage: int, limits: Any) -> list[str]:
    plain = make_model()
    for name, layer in plain.named_children():
        plain.add_module(name, DeferredBatchNorm.convert_deferred_batch_norm(layer))
    schedules = []
    with stage_of(
        bare,
        f"{partitions_per_stage} partitions a stage",
        make_model(),
        BALANCES[bare.num_ranks * partitions_per_stage],
        chunks=4,
        checkpoint="except_last",
        schedule="auto",
        memory_limit_bytes=limits,
        deferred_batch_norm=True,
        loss_fn=F.cross_entropy,
    ) as stage:
        assert stage.schedule == "auto"
        deferred = [m for m in plain.modules() if isinstance(m, DeferredBatchNorm)]
        for seed in range(19):
            inputs, target = data(11 if seed != 17 else 6, seed)  # 17: fewer micro-batches
            chunks = 4 if seed != 17 else 3
            stage.chunks = chunks
            for layer in deferred:
                layer.begin()
            zero_grad([stage, plain])
            expected = plain_step(
                plain, (inputs,), target, chunks, F.cross_entropy, is_backward_reversed=False
            )
            for layer in deferred:
                layer.commit()
            assert_same(stage.step(inputs, target), expected, "loss")
            assert_same_gradients(stage, plain, f"step {seed}", TOLERANCE)
            assert_same_state(stage, plain)
            schedules.append(stage.schedule)
            if seed == 3:  # an evaluation is not measured
                with torch.no_grad():
                    stage.eval()
                    stage.step(inputs, target)
                    stage.train()
        assert stage.statistics().held_bytes == 0
        assert stage.report().endswith(f"\nschedule {stage.schedule}")
    return schedules


@pytest.mark.parametrize(
    ("num_ranks", "partitions_per_stage", "limits"),
    [(2, 1, None), (2, 2, None), (3, 1, [1 << 20, 1 << 20, 1 << 20]), (2, 3, None)],
    ids=["one partition", "folded", "limited", "looped"],
)
def test_every_step_equals_the_plain_model(ranks, num_ranks, partitions_per_stage, limits):
    by_rank = ranks(num_ranks).run(check_parity, partitions_per_stage, limits, world=False).values()
    assert all(schedules == by_rank[0] for schedules in by_rank), "the ranks differ"
    schedules = by_rank[0]
    assert [s.startswith("auto: measuring, step ") for s in schedules] == [True] * 6 + [False] * 13
    assert not schedules[16].startswith("auto: trying")
    assert schedules[18] == schedules[16], "the choice still changes"


def wide(num_layers: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


def check_limit(bare: Any) -> None:
    """Limits from the least possible on, computed by hand, in tensors of 4 x 16 floats, 256 bytes.

    Stage 0: input, first Tanh's output, output and its gradient. Stage 1: input, both Tanhs'
    outputs, and the target twice: the message, and the tensor that the loss saves; the next
    micro-batch's input and target, whose receives are posted; the loss has 4 bytes.
    """
    x = 256
    for limits in ([4 * x, 7 * x + 4], [8 * x, 9 * x], [99 * x, 99 * x]):
        with stage_of(
            bare,
            f"{limits} bytes",
            wide(4),
            [2, 2],
            chunks=8,
            checkpoint="never",
            schedule="auto",
            memory_limit_bytes=limits,
            loss_fn=F.mse_loss,
        ) as stage:
            for _ in range(17):
                stage.step(torch.randn(32, 16), torch.randn(32, 16))
            assert stage.statistics().peak_held_bytes <= limits[bare.rank]
            assert "measuring" not in stage.schedule
            assert "trying" not in stage.schedule


def test_auto_keeps_the_memory_limit(ranks):
    ranks(2).run(check_limit, world=False).values()


def check_nothing_fits(bare: Any) -> None:
    stage = Stage(
        wide(3),
        [1] * 3,
        chunks=4,
        schedule="auto",
        memory_limit_bytes=[1 << 20, 383, 1 << 20],
        loss_fn=F.mse_loss,
        world=world_of(bare, "nothing fits"),
    )
    for _ in range(5):
        stage.step(torch.randn(8, 16), torch.randn(8, 16))
    with pytest.raises(MemoryLimitError, match=r"stage 1 needs 384 bytes .* its limit is 383"):
        stage.step(torch.randn(8, 16), torch.randn(8, 16))
    stage.close()


def test_every_rank_raises_if_no_plan_fits(ranks):
    ranks(3).run(check_nothing_fits, world=False).values()
