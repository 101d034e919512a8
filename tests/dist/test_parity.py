"""Every schedule's results equal those of the plain ``nn.Sequential``, bit for bit.

Truth is the plain model in float64 over the same micro-batches, with gradients summed in the plan's
order. The fuzzer (tests/fuzz) compares many models, options and calls, on CPUs; this one model runs
on GPUs, in plans of a user's own, and with as many partitions a stage as no case of the fuzzer has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage
from procpipe.plan.placement import folded, looped
from procpipe.plan.task import BACKWARD, FORWARD, Plan, Task
from procpipe.skip import Namespace, pop, skippable, stash
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    num_held,
    plain_backward,
    plain_step,
    stage_of,
)

pytestmark = pytest.mark.on_gpus

#: Numbers of micro-batches with sizes of mini-batches, which leave a smaller last micro-batch.
BATCHES = {1: 5, 3: 11, 8: 23}

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


def make_batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


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
    bare: Any, schedule: str | Callable[[int, int], Plan], num_partitions: int
) -> None:
    modes = MODES if isinstance(schedule, str) else ["always"]  # users' plans recompute nothing
    for mode, (chunks, size) in zip(cycle(modes), BATCHES.items()):
        plain = make_model()
        options: Any = {"chunks": chunks, "checkpoint": mode, "schedule": schedule}
        options |= {"loss_fn": F.cross_entropy}
        balance = BALANCES[num_partitions]
        with stage_of(bare, f"{mode} {chunks}", plain, balance, **options) as stage:
            is_reversed = schedule == "gpipe"
            for seed in (2, 3):
                inputs, target = make_batch(size, seed)
                expected = plain_step(
                    plain, (inputs,), target, chunks, F.cross_entropy,
                    is_backward_reversed=is_reversed,
                )  # fmt: skip
                assert_same(stage.step(inputs, target), expected, "loss")
                assert_same_gradients(stage, plain)
                assert_same_state(stage, plain)
            check_other_calls(stage, plain, inputs, target)
            assert num_held(stage) == 0


def check_other_calls(stage: Stage, plain: nn.Sequential, inputs: Tensor, target: Tensor) -> None:
    """A user's loss after ``stage(input)``, a fetched output and an evaluation."""
    for model in (stage, plain):
        model.zero_grad()
    expected, expected_loss = plain_backward(
        plain, (inputs,), stage.chunks, partial(F.cross_entropy, target=target)
    )
    output = stage(inputs)
    loss = F.cross_entropy(output, target.to(stage.device))
    loss.backward()
    assert_same(stage.fetch(output), expected, "output")
    assert_same(stage.fetch(loss), expected_loss, "loss of the output")
    assert_same_gradients(stage, plain)
    assert_same_state(stage, plain)
    plain.eval()
    stage.eval()
    with torch.no_grad():
        expected_loss = plain_step(plain, (inputs,), target, stage.chunks, F.cross_entropy)
    for x, y in stage.batches([(inputs, target)]):
        assert_same(stage.step(x, y), expected_loss, "evaluation")


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_partitions"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.gpu)
            for each in [
                *(("gpipe", 3, 3), ("gpipe", 4, 4), ("1f1b", 2, 2), ("zb-h1", 3, 3)),
                *(("interleaved", 2, 4), ("zb-v", 3, 6), (in_a_loop, 2, 4)),
            ]
        ),
        ("interleaved", 2, 8),
        ("zb-v", 4, 8),
        (in_a_fold, 1, 1),
        (in_a_fold, 2, 4),
        (without_the_turn, 2, 3),
    ],
)
def test_a_plan_gives_the_plain_models_results(ranks, schedule, num_ranks, num_partitions):
    ranks(num_ranks).run(check_parity, schedule, num_partitions, world=False).values()
