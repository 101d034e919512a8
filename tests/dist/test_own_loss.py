"""Own loss of ``stage(input)``: what it needs is on the last stage, of one mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Remote, RemoteValueError, Stage
from tests.dist.stages import assert_same, assert_same_gradients, plain_backward, stage_of
from tests.test_tree import Encoding, Output, Pair

BALANCES = pytest.mark.parametrize("balance", [[3], [1, 1, 1]], ids=str)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def make_stage(world: Any, **options: Any) -> Stage:
    num_stages = world.num_ranks // options.get("replicas", 1)
    balance = [4 - num_stages, *[1] * (num_stages - 1)]
    return Stage(make_model(), balance, world=world, chunks=2, **options)


# -- what the loss needs is on the last stage -----------------------------------------------------


def flat_cross_entropy(output: Any, target: Any) -> Any:
    return F.cross_entropy(output.view(-1, output.size(-1)), target.to(output.device).view(-1))


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
Y = torch.tensor([0, 5, 2, 1, 3])

#: A loader's item, its input, and the loss code of it.
FORMS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "tensor": (X, lambda b: b, F.mse_loss),
    "input twice": ((X, X), lambda b: b[0], lambda o, b: F.mse_loss(o, b[1])),
    "containers of registered classes": (
        Output(X, {"y": Pair(Y, 1), "k": (None, X)}),
        lambda b: b.loss,
        lambda o, b: flat_cross_entropy(o, b.hidden["y"].x) + F.mse_loss(o, b.hidden["k"][1]),
    ),
    "a mapping of a class that is not registered": (
        Encoding({"x": X, "y": Y, "n": 1}),
        lambda b: b["x"],
        lambda o, b: flat_cross_entropy(o, b["y"]),
    ),
    "with what cannot travel": (
        {"x": X, "name": object(), "sparse": torch.eye(2).to_sparse(), "y": Y},
        lambda b: b["x"],
        lambda o, b: flat_cross_entropy(o, b["y"]),
    ),
}


def check_forms(bare: Any, balance: list[int]) -> None:
    for name, (item, input_of, loss_of) in FORMS.items():
        plain = make_model()
        with stage_of(bare, name, plain, balance, chunks=2) as stage:
            for batch in stage.batches([item, item] if bare.rank == 0 else None):
                plain.zero_grad()
                stage.zero_grad()
                loss = loss_of(stage(input_of(batch)), batch)
                loss.backward()
                _, expected = plain_backward(
                    plain, (input_of(item),), 2, partial(lambda o, f, i: f(o, i), f=loss_of, i=item)
                )
                assert_same(stage.fetch(loss), expected, name)
                assert_same_gradients(stage, plain, name)
                if bare.rank == 0:
                    assert input_of(batch) is input_of(item)
                assert type(batch) in (type(item), Remote, dict)


@BALANCES
def test_batches_of_any_form_bring_what_the_loss_needs(ranks: Any, balance: list[int]) -> None:
    ranks(len(balance)).run(check_forms, balance, world=False).values()


def count_targets(world: Any) -> dict[str, int]:
    """Return how many messages with a target a step sends, by the form of the items."""
    stage = make_stage(world, loss_fn=F.cross_entropy)
    steps: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "tuple": ((X, Y), lambda b: stage.step(*b)),
        "dict": ({"x": X, "y": Y}, lambda b: stage.step(b["x"], b["y"])),
        "by name": ({"input": X, "labels": Y}, lambda b: stage.step(**b)),
        "dataclass": (Output(X, {"y": [Y]}), lambda b: stage.step(b.loss, b.hidden["y"][0])),
        "another": ({"x": X, "y": Y}, lambda b: stage.step(b["x"], b["y"].clone())),
    }
    found, losses = {}, [stage.step(X, Y)]
    for name, (item, step) in steps.items():
        before = stage.statistics().num_messages.get("target", 0)
        losses += [step(batch) for batch in stage.batches([item])]
        found[name] = stage.statistics().num_messages.get("target", 0) - before
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return found


def test_step_does_not_send_again_what_batches_has_sent(ranks: Any) -> None:
    found = ranks(2).run(count_targets).values()[0]
    assert found == {"tuple": 0, "dict": 0, "by name": 0, "dataclass": 0, "another": 1}


# -- values that no rank has together -------------------------------------------------------------


class Sample:
    """An item that is no container."""

    x, y = X, Y


CANNOT_TRAVEL: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "'y' of the mini-batch": ({"y": [Y, object()], "x": X}, lambda b: b["x"], lambda b: b["y"][0]),
    "the mini-batch": (Sample(), lambda b: b.x, lambda b: b.y),
}


def use_what_cannot_travel(world: Any, name: str) -> str:
    item, input_of, target_of = CANNOT_TRAVEL[name]
    stage, text = make_stage(world), ""
    for batch in stage.batches([item]):
        try:
            flat_cross_entropy(stage(input_of(batch)), target_of(batch))
        except RemoteValueError as error:  # to the loop's end, as the other rank does
            text = str(error)
    return text


def test_a_loss_of_what_cannot_travel_says_so(ranks: Any) -> None:
    for name in CANNOT_TRAVEL:
        first, second = ranks(2).run(use_what_cannot_travel, name).values()
        assert first == ""
        assert f"rank 0 ({name}, which cannot travel to other ranks)" in second


# -- each rank's own data ------------------------------------------------------------------------


def read_own(world: Any, what: str) -> int:
    """Train with a loader of each rank's own; return the number of calls that ended well."""
    stage, num_calls = make_stage(world), 0
    own = torch.Generator().manual_seed(world.rank if what != "equal" else 0)
    for _ in range(9):
        x: Any = torch.randn(4, 6, generator=own, dtype=torch.float64)
        if world.rank > 0 and what == "size":
            x = x[:3]
        elif world.rank > 0 and what == "nothing":
            x = None
        if what == "later" and num_calls < 3:
            stage(torch.ones(4, 6, dtype=torch.float64))
        else:
            stage(x)
        num_calls += 1
    return num_calls


@pytest.mark.parametrize(
    ("what", "how", "call"),
    [("later", "of other values", 4), ("size", "float64 (3, 6) instead of float64 (4, 6)", 1)],
)
def test_own_data_on_another_rank_is_an_error_on_every_rank(
    ranks: Any, what: str, how: str, call: int
) -> None:
    for error in ranks(2).run(read_own, what).errors():
        assert error.type == "DisagreementError"
        other = f"in call {call} of stage(input), rank 1 passes another input than rank 0"
        for words in (other, how, "read its own data", "stage.batches(loader)"):
            assert words in error.text


@pytest.mark.parametrize("what", ["equal", "nothing"])
def test_equal_data_or_none_pass(ranks: Any, what: str) -> None:
    assert ranks(2).run(read_own, what).values() == [9, 9]


def read_own_in_replicas(world: Any, what: str) -> int:
    stage, num_calls = make_stage(world, replicas=2), 0
    is_last = world.rank % 2 == 1
    loader = [torch.full((4, 6), 1.0 + world.rank, dtype=torch.float64)] * 3
    for x in stage.batches(loader):
        if is_last and what == "own":
            x = loader[0]
        elif is_last and what == "of its replica's first":
            x = loader[0] - 1
        stage(x)
        num_calls += 1
    return num_calls


def test_replicas_that_read_their_own_are_compared_with_their_first(ranks: Any) -> None:
    assert ranks(4).run(read_own_in_replicas, "placeholders").values() == [3] * 4
    assert ranks(4).run(read_own_in_replicas, "of its replica's first").values() == [3] * 4
    for error in ranks(4).run(read_own_in_replicas, "own").errors():
        assert "rank 1 (stage 1 of replica 0) passes another input than rank 0 (" in error.text
        assert "rank 3 (stage 1 of replica 1) passes another input than rank 2 (" in error.text
