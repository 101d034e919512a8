"""Skip tensors over real processes: sent once and directly, with the plain model's results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage
from procpipe.job.world import World
from procpipe.skip import Namespace, pop, skippable, stash
from tests.cases import pairs
from tests.dist.devices import is_on_gpus
from tests.dist.stages import assert_same, num_held

pytestmark = pytest.mark.on_gpus


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x * 2)
        return x


@skippable(stash={"skip": 2})
class StashForTwo(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", torch.tanh(x))
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip


@skippable(stash=["nothing", "ids", "mask"])
class StashOthers(nn.Module):
    """Stashes None, integers, and floats that require no gradient."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("nothing", None)
        yield stash("ids", (x * 10).long())
        yield stash("mask", (x > 0).to(x.dtype).detach())
        return x


@skippable(pop=["nothing", "ids", "mask"])
class PopOthers(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        nothing = yield pop("nothing")
        ids = yield pop("ids")
        mask = yield pop("mask")
        assert nothing is None
        assert ids.dtype == torch.int64
        assert not mask.requires_grad
        return x * mask + ids


def isolated(layer: nn.Module, namespace: Namespace) -> nn.Module:
    return layer.isolate(namespace)  # type: ignore[operator, no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    a, b, c = Namespace(), Namespace(), Namespace()
    return nn.Sequential(
        nn.Linear(4, 4),
        isolated(Stash(), a),
        nn.Linear(4, 4),
        isolated(StashForTwo(), b),
        StashOthers(),
        isolated(Stash(), c),
        isolated(Pop(), c),  # in the same stage as its stash, for every balance
        nn.Dropout(0.0),
        isolated(Pop(), a),
        nn.Linear(4, 4),
        isolated(Pop(), b),
        PopOthers(),
        isolated(Pop(), b),
        nn.Linear(4, 3),
    ).double()


BALANCES = {
    1: [[14]],
    2: [[2, 12], [6, 8], [10, 4]],
    3: [[2, 4, 8], [4, 6, 4], [1, 11, 2]],
    4: [[2, 3, 5, 4], [4, 2, 3, 5], [3, 3, 3, 5]],
}


def truth(chunks: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, loss and gradients of the plain model over the same micro-batches."""
    plain = model()
    outputs = [plain(part) for part in x.chunk(chunks)]
    parts = list(zip(outputs, y.chunk(chunks), strict=True))
    losses = [F.cross_entropy(output, target) for output, target in parts]
    shares = [len(target) / len(y) for _, target in parts]
    for loss, share in reversed(list(zip(losses, shares, strict=True))):
        loss.backward(torch.tensor(share, dtype=loss.dtype))
    total = sum(loss.detach() * share for loss, share in zip(losses, shares, strict=True))
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert isinstance(total, Tensor)
    return torch.cat(outputs).detach(), total, gradients


def check_parity(world: World, balance: list[int], cases: list[tuple[str, int]]) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    stage = Stage(model(), balance, loss_fn=F.cross_entropy, world=world)
    for mode, chunks in cases:
        output, loss, gradients = truth(chunks, x, y)
        case = (balance, chunks, mode)
        stage.chunks, stage.checkpoint = chunks, mode
        stage.zero_grad()
        assert_same(stage.step(x, y), loss, str(case))
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            assert_same(parameter.grad, gradients[name], f"{case} {name}")
        assert num_held(stage) == 0, case

        stage.zero_grad()
        stage_output = stage(x)
        assert_same(stage.fetch(stage_output), output, str(case))
        F.cross_entropy(stage_output, y.to(stage.device)).backward()
        for name, parameter in stage.named_parameters():
            assert_same(parameter.grad, gradients[name], f"{case} {name}", 1e-13, 1.0)
        stage.eval()
        with torch.no_grad():
            assert_same(stage.fetch(stage(x)), output, f"{balance} {chunks} eval")
        stage.train()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_results_with_skips_equal_the_plain_model(ranks: Any, n: int) -> None:
    cases = pairs(BALANCES[n], ("never", "except_last", "always"), (1, 2, 3, 8))
    for balance in BALANCES[n]:
        of_balance = [(mode, chunks) for other, mode, chunks in cases if other == balance]
        ranks(n).run(check_parity, balance, of_balance).values()


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


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
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
    balance = {2: [3, 4], 3: [2, 2, 3], 4: [2, 2, 2, 1]}[world.num_ranks]
    stage = Stage(
        nn.Sequential(*layers), balance, chunks=4, checkpoint=mode, loss_fn=F.mse_loss, world=world
    )
    stage.step(torch.randn(8, 4), torch.randn(8, 4))
    statistics = stage.statistics()
    return statistics.sent_bytes, statistics.num_messages


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_skip_tensor_is_sent_once_and_directly(ranks: Any, n: int, mode: str) -> None:
    of_ranks = ranks(n).run(count_traffic, mode).values()
    width = 4 * 8 * 4  # floats of 4 bytes, 8 samples, 4 features
    for rank, (sent, messages) in enumerate(of_ranks):
        is_first, is_last = rank == 0, rank == n - 1
        assert sent.get("skip", 0) == (3 * width if is_first else 0)
        assert sent.get("skip gradient", 0) == (3 * width if is_last else 0)
        assert sent.get("activation", 0) == (0 if is_last else width)
        assert sent.get("gradient", 0) == (0 if is_first else width)
        assert messages.get("skip", 0) == (4 if is_first else 0)


def count_live_skips(world: World) -> int:
    alive: list[weakref.ref[Tensor]] = []

    @skippable(stash=["skip"])
    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            skip = x * 2
            alive.append(weakref.ref(skip))
            yield stash("skip", skip)
            return x

    @skippable(pop=["skip"])
    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            skip = yield pop("skip")
            alive.append(weakref.ref(skip))
            return x + skip

    layers = [nn.Linear(4, 4), Watched(), nn.Linear(4, 4), Watching()]
    stage = Stage(
        nn.Sequential(*layers), [2, 2], chunks=3, checkpoint="always", loss_fn=F.mse_loss,
        world=world,
    )  # fmt: skip
    for _ in range(3):
        stage.step(torch.randn(6, 4), torch.randn(6, 4))
    with torch.no_grad():
        stage(torch.randn(6, 4))
    gc.collect()
    assert alive, "the layers have run"
    return sum(reference() is not None for reference in alive)


def test_no_skip_tensor_outlives_its_step(ranks: Any) -> None:
    # On GPUs the next call frees what the last one has sent: the device may still need it.
    num_sent = 3 if is_on_gpus() else 0
    first, last = ranks(2).run(count_live_skips).values()
    assert first <= num_sent
    assert last == 0


def build_with_unmatched_skips(world: World) -> None:
    Stage(nn.Sequential(Stash(), nn.Linear(4, 4), nn.Linear(4, 4)), [1, 2], world=world)


def test_unmatched_skips_are_refused_on_every_rank(ranks: Any) -> None:
    for failure in ranks(2).run(build_with_unmatched_skips).errors():
        assert failure.type == "TypeError"
        assert (
            "'skip' is stashed by layer '0' (pops declared: 1), and popped by no layer"
            in failure.text
        )


def model_with_skippable_loss() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Stash(), nn.Linear(4, 4), Pop(), nn.Linear(4, 4)]
    judge = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Tanh(), Pop())
    return nn.Sequential(*layers).double(), judge.double()


def check_skippable_loss(world: World, mode: str) -> None:
    """The loss is a network whose skip tensor has the same name as one of the stage's."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    plain, judge = model_with_skippable_loss()
    for part in reversed(x.chunk(2)):
        (judge(plain(part)).square().mean() / 2).backward()
    whole, judge = model_with_skippable_loss()
    judge.to(world.device)
    stage = Stage(
        whole, [2, 3], chunks=2, checkpoint=mode, loss_fn=lambda y: judge(y).square().mean(),
        world=world,
    )  # fmt: skip
    stage.step(x, target=None)
    for name, parameter in stage.named_parameters():
        truth = plain.get_parameter(name).grad
        assert parameter.grad is not None
        assert truth is not None
        assert_same(parameter.grad, truth, name)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_the_loss_may_have_skips_of_its_own(ranks: Any, mode: str) -> None:
    ranks(2).run(check_skippable_loss, mode).values()


@skippable(pop=["skip"])
class PopInPlace(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip.add_(1)


def change_a_skip_that_is_needed_later(world: World, mode: str) -> None:
    layers = [nn.Linear(4, 4), StashForTwo(), PopInPlace(), nn.Linear(4, 4), Pop()]
    stage = Stage(
        nn.Sequential(*layers), [2, 2, 1], checkpoint=mode, loss_fn=F.mse_loss, world=world
    )
    stage.step(torch.randn(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_skip_tensor_that_is_needed_later_must_not_change(ranks: Any, mode: str) -> None:
    outcomes = ranks(3).run(change_a_skip_that_is_needed_later, mode)
    text = outcomes[1].error.text
    assert "in place" in text
    if mode == "never":
        assert "skip tensor 'skip' was changed in place" in text
        assert "partition 2 pops it too" in text


class OnlyInTraining(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.training else x


def check_skips_that_are_left_out(world: World) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), OnlyInTraining(Stash()), OnlyInTraining(Pop())]
    plain = nn.Sequential(*layers).eval()
    x = torch.ones(4, 4)
    # By micro-batches: on some CPUs the last digits depend on the number of rows.
    expected = torch.cat([plain(part).detach() for part in x.chunk(2)])
    stage = Stage(plain, [2, 1], chunks=2, world=world)
    stage.eval()
    assert_same(stage.fetch(stage(x)), expected, "output")


def test_a_skip_may_be_left_out_at_both_ends(ranks: Any) -> None:
    ranks(2).run(check_skips_that_are_left_out).values()
