"""Every schedule's results equal the plain model's, bit for bit; it holds the simulated bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import schedule_of
from procpipe.plan.task import Plan
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from procpipe.skip import Namespace, pop, skippable, stash
from tests.dist.devices import some_of
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    plain_backward,
    plain_step,
    stage_of,
    two_at_a_time,
)

pytestmark = pytest.mark.on_gpus

#: By number of partitions.
BALANCES = {
    1: [9],
    2: [3, 6],
    3: [2, 3, 4],
    4: [1, 3, 2, 3],
    6: [1, 2, 1, 2, 1, 2],
    8: [1, 1, 1, 1, 1, 1, 1, 2],
}


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", torch.tanh(x))
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip


class SeededDropout(nn.Module):
    """Dropout whose mask depends only on the input, so the plain model has the same mask."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        generator = torch.Generator().manual_seed(int(x.detach().abs().sum() * 1e6) % 2**31)
        mask = torch.rand(x.shape, generator=generator) > 0.3
        return x * mask.to(x) / 0.7


def isolated(layer: nn.Module, namespace: Namespace) -> nn.Module:
    return layer.isolate(namespace)  # type: ignore[operator, no-any-return]


def make_model() -> nn.Sequential:
    """Layers with buffers, random numbers, in-place changes and two crossing skips."""
    torch.manual_seed(1)
    near, far = Namespace(), Namespace()
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), isolated(Stash(), far)),
        nn.BatchNorm1d(8),
        isolated(Stash(), near),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
        isolated(Pop(), far),
        nn.Linear(8, 8),
        isolated(Pop(), near),
        SeededDropout(),
        nn.Linear(8, 3),
    ).double()


def check_parity(
    bare: Any,
    schedule: str | Callable[[int, int], Plan],
    modes: Collection[str],
    partitions_per_stage: int = 1,
) -> None:
    for mode, (chunks, size) in some_of(product(modes, ((1, 5), (2, 9), (3, 11), (8, 23)))):
        plain = make_model()
        with stage_of(
            bare,
            f"{mode} {chunks}",
            plain,
            BALANCES[bare.num_ranks * partitions_per_stage],
            chunks=chunks,
            checkpoint=mode,
            schedule=schedule,
            loss_fn=F.cross_entropy,
        ) as stage:
            for seed in (2, 3):
                generator = torch.Generator().manual_seed(seed)
                inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
                target = torch.randint(3, (size,), generator=generator)
                expected = plain_step(
                    plain,
                    (inputs,),
                    target,
                    chunks,
                    F.cross_entropy,
                    is_backward_reversed=False,
                )
                assert_same(stage.step(inputs, target), expected, "loss")
                assert_same_gradients(stage, plain)
                assert_same_state(stage, plain)
            assert stage.statistics().held_bytes == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_one_forward_one_backward_equals_the_plain_model(ranks, num_ranks):
    modes = MODES if num_ranks == 2 else ["except_last"]
    ranks(num_ranks).run(check_parity, "1f1b", modes, world=False).values()


@pytest.mark.parametrize(
    ("num_ranks", "partitions_per_stage"), [(1, 4), (2, 2), (2, 3), (2, 4), (3, 2), (4, 2)]
)
def test_interleaved_equals_the_plain_model(ranks, num_ranks, partitions_per_stage):
    modes = MODES if num_ranks == 2 else ["except_last"]
    ranks(num_ranks).run(
        check_parity, "interleaved", modes, partitions_per_stage, world=False
    ).values()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_zb_h1_equals_the_plain_model(ranks, num_ranks):
    modes = MODES if num_ranks == 2 else ["except_last"]
    ranks(num_ranks).run(check_parity, "zb-h1", modes, world=False).values()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_zb_v_equals_the_plain_model(ranks, num_ranks):
    modes = MODES if num_ranks == 2 else ["except_last"]
    ranks(num_ranks).run(check_parity, "zb-v", modes, 2, world=False).values()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_users_plan_equals_the_plain_model(ranks, num_ranks):
    ranks(num_ranks).run(check_parity, two_at_a_time, ["always"], world=False).values()


def check_memory(bare: Any) -> None:
    """A stage holds as much of 32 micro-batches as of 8, where fill-and-drain holds all."""
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        for chunks in (8, 32):
            model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(bare.num_ranks)])
            with stage_of(
                bare,
                f"{schedule} {chunks}",
                model,
                [1] * bare.num_ranks,
                chunks=chunks,
                checkpoint="never",
                schedule=schedule,
                loss_fn=F.mse_loss,
            ) as stage:
                data = torch.randn(2 * chunks, 16), torch.randn(2 * chunks, 16)
                stage.step(*data)
                peaks[schedule, chunks] = stage.statistics().peak_held_bytes
    assert peaks["1f1b", 32] == peaks["1f1b", 8]
    assert peaks["gpipe", 32] > 3 * peaks["gpipe", 8] > 3 * peaks["1f1b", 8]


def test_one_forward_one_backward_holds_no_more_for_more_micro_batches(ranks):
    ranks(2).run(check_memory, world=False).values()


ROWS, WIDTHS = 3, (6, 40, 3, 17, 9, 21, 2)


def check_predicted_memory(bare: Any, schedule: str, partitions_per_stage: int) -> None:
    """A stage holds the simulated bytes: of messages, local transfers, skips and losses."""
    n = bare.num_ranks
    p = n * partitions_per_stage
    torch.manual_seed(1)
    far = Namespace()
    layers = [nn.Sequential(nn.Linear(WIDTHS[j], WIDTHS[j + 1])) for j in range(p)]
    layers[0].append(isolated(Stash(), far))
    layers[p - 1].insert(0, nn.Linear(WIDTHS[p - 1], WIDTHS[1]))
    layers[p - 1].insert(1, isolated(Pop(), far))
    layers[p - 1].insert(2, nn.Linear(WIDTHS[1], WIDTHS[p - 1]))
    model = nn.Sequential(*layers).double()
    sizes = [ROWS * width * 8 for width in WIDTHS]
    placement = schedule_of(schedule).place(p, n)
    for mode in MODES:
        for m in (1, 2, 5):
            plan = schedule_of(schedule).plan(m, placement, recomputed(mode, m))
            costs = Costs(
                *(((1.0,) * p,) * 3),
                input_bytes=sizes[0],
                output_bytes=(*sizes[1:p], 8),  # the last keeps the loss
                skip_bytes={(0, p - 1): sizes[1]},
                target_bytes=sizes[p],
            )
            has_route = placement[-1] != 0
            routes = Routes(n, ((0, p - 1),), has_route, placement=placement)
            with stage_of(
                bare,
                f"{mode} {m}",
                model,
                [1] * p,
                chunks=m,
                checkpoint=mode,
                schedule=schedule,
                loss_fn=F.mse_loss,
            ) as stage:
                for _ in range(2):
                    inputs = torch.randn(m * ROWS, WIDTHS[0], dtype=torch.float64)
                    stage.step(inputs, torch.randn(m * ROWS, WIDTHS[p], dtype=torch.float64))
                statistics = stage.statistics()
            expected = simulate(plan, costs, routes).peak_bytes(bare.rank)
            assert statistics.peak_held_bytes == expected, f"{mode} {m}"
            assert statistics.held_bytes == 0


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "partitions_per_stage"),
    [
        ("1f1b", 3, 1),
        ("zb-h1", 3, 1),
        ("interleaved", 2, 3),
        ("interleaved", 3, 2),
        ("zb-v", 2, 2),
        ("zb-v", 3, 2),
    ],
)
def test_every_schedule_holds_the_simulated_bytes(ranks, schedule, num_ranks, partitions_per_stage):
    ranks(num_ranks).run(
        check_predicted_memory, schedule, partitions_per_stage, world=False
    ).values()


def check_other_calls(bare: Any, schedule: str) -> None:
    """A user's loss after ``stage(input)``, a fetched output and an evaluation."""
    plain = make_model()
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    target = torch.randint(3, (9,), generator=generator)
    with stage_of(
        bare,
        schedule,
        plain,
        BALANCES[2 * bare.num_ranks],
        chunks=4,
        schedule=schedule,
        loss_fn=F.cross_entropy,
    ) as stage:
        expected, expected_loss = plain_backward(
            plain, (inputs,), 4, lambda output: F.cross_entropy(output, target)
        )
        output = stage(inputs)
        loss = F.cross_entropy(output, target.to(stage.device))
        loss.backward()
        assert_same(stage.fetch(output), expected, "output")
        assert_same(stage.fetch(loss), expected_loss, "loss")
        assert_same_gradients(stage, plain)
        assert_same_state(stage, plain)
        plain.eval()
        stage.eval()
        with torch.no_grad():
            expected_loss = plain_step(plain, (inputs,), target, 4, F.cross_entropy)
        assert_same(stage.step(inputs, target), expected_loss, "evaluation")
        items = list(stage.batches([(inputs, target)]))
        for x, y in items:
            assert_same(stage.step(x, y), expected_loss, "evaluation by batches")
        assert stage.statistics().held_bytes == 0


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_other_calls_with_two_partitions_per_stage(ranks, schedule, num_ranks):
    ranks(num_ranks).run(check_other_calls, schedule, world=False).values()
