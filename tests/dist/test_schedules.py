"""Every schedule's results equal the plain model's, bit for bit; it holds the simulated bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe.plan.placement import folded, looped
from procpipe.plan.task import BACKWARD, FORWARD, Plan, Task
from procpipe.skip import Namespace, pop, skippable, stash
from tests.dist.devices import some_of
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    num_held,
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


def one_at_a_time(m: int, n: int, placement: tuple[int, ...]) -> Plan:
    """Run each micro-batch forward and backward before the next; a user's plan."""
    js = range(len(placement))
    path = [*((FORWARD, j) for j in js), *((BACKWARD, j) for j in reversed(js))]
    return Plan(m, n, [(Task(kind, i, j),) for i in range(m) for kind, j in path], placement)


def in_a_loop(m: int, n: int) -> Plan:
    return one_at_a_time(m, n, looped(2 * n, n))


def in_a_fold(m: int, n: int) -> Plan:
    return one_at_a_time(m, n, folded(2 * n, n))


def without_the_turn(m: int, n: int) -> Plan:
    """Fold, with one partition on the last stage and two on the others."""
    return one_at_a_time(m, n, (*range(n), *reversed(range(n - 1))))


def check_parity(
    bare: Any,
    schedule: str | Callable[[int, int], Plan],
    modes: Collection[str],
    num_partitions: int,
) -> None:
    for mode, (chunks, size) in some_of(product(modes, ((1, 5), (2, 9), (3, 11), (8, 23)))):
        plain = make_model()
        with stage_of(
            bare,
            f"{mode} {chunks}",
            plain,
            BALANCES[num_partitions],
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
            assert num_held(stage) == 0


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_partitions"),
    [
        *(("1f1b", n, n) for n in (1, 2, 3, 4)),
        *(("interleaved", n, v * n) for n, v in ((1, 4), (2, 2), (2, 3), (2, 4), (3, 2), (4, 2))),
        *(("zb-h1", n, n) for n in (1, 2, 3, 4)),
        *(("zb-v", n, 2 * n) for n in (1, 2, 3, 4)),
    ],
)
def test_a_schedule_equals_the_plain_model(ranks, schedule, num_ranks, num_partitions):
    modes = MODES if num_ranks == 2 else ["except_last"]
    ranks(num_ranks).run(check_parity, schedule, modes, num_partitions, world=False).values()


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_partitions"),
    [
        (two_at_a_time, 2, 2),
        (two_at_a_time, 3, 3),
        (in_a_loop, 2, 4),
        (in_a_fold, 1, 1),
        (in_a_fold, 2, 4),
        (without_the_turn, 2, 3),
    ],
)
def test_a_users_plan_equals_the_plain_model(ranks, schedule, num_ranks, num_partitions):
    ranks(num_ranks).run(check_parity, schedule, ["always"], num_partitions, world=False).values()


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
        assert num_held(stage) == 0


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_other_calls_with_two_partitions_per_stage(ranks, schedule, num_ranks):
    ranks(num_ranks).run(check_other_calls, schedule, world=False).values()
