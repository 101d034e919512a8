"""Own loss of ``stage(input)``: what it needs is on the last stage, and only one mini-batch counts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from procpipe import NoChunk, Remote, Stage
from tests.dist.stages import assert_same, assert_same_gradients, stage_of

BALANCES = pytest.mark.parametrize("balance", [[3], [2, 1], [1, 1, 1]], ids=str)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def make_stage(world: Any, **options: Any) -> Stage:
    num_stages = world.num_ranks // options.get("replicas", 1)
    balance = [4 - num_stages, *[1] * (num_stages - 1)]
    return Stage(make_model(), balance, world=world, chunks=2, **options)


# -- each rank's own data ------------------------------------------------------------------------


def read_own(world: Any, what: str) -> int:
    """Train with a loader of each rank's own; return the number of calls that ended well."""
    stage, num_calls = make_stage(world), 0
    own = torch.Generator().manual_seed(world.rank if what != "equal" else 0)
    for _ in range(9):
        x = torch.randn(4, 6, generator=own, dtype=torch.float64)
        if world.rank > 0:
            if what == "size":
                x = x[:3]
            elif what == "dtype":
                x = x.float()
            elif what == "nothing":
                x = None
        if what == "by name":
            stage(input=x)
        elif what == "in evaluation":
            with torch.no_grad():
                stage.eval()(x)
        elif what == "number":
            stage(x if world.rank == 0 else (x, x))
        elif what == "later" and num_calls < 3:
            stage(torch.ones(4, 6, dtype=torch.float64))
        else:
            stage(x)
        num_calls += 1
    return num_calls


OTHER = "float64 (4, 6) of other values"


@pytest.mark.parametrize(
    ("what", "how", "call"),
    [
        ("values", OTHER, 1),
        ("by name", OTHER, 1),
        ("in evaluation", OTHER, 1),
        ("later", OTHER, 4),
        ("size", "float64 (3, 6) instead of float64 (4, 6)", 1),
        ("number", "2 tensors instead of 1", 1),
        ("dtype", "float32 (4, 6) instead of float64 (4, 6)", 1),
    ],
)
def test_own_data_on_another_rank_is_an_error_on_every_rank(
    ranks: Any, what: str, how: str, call: int
) -> None:
    for error in ranks(2).run(read_own, what).errors():
        assert error.type == "DisagreementError"
        assert f"in call {call} of stage(input), rank 1 passes another input than rank 0" in (
            error.text
        )
        assert f"({how})" in error.text
        assert "read its own data" in error.text
        assert "stage.batches(loader)" in error.text


def test_each_rank_with_other_data_is_named(ranks: Any) -> None:
    for error in ranks(3).run(read_own, "values").errors():
        assert "rank 1 passes another input than rank 0" in error.text
        assert "rank 2 passes another input than rank 0" in error.text


@pytest.mark.parametrize("what", ["equal", "nothing"])
def test_equal_data_or_none_pass(ranks: Any, what: str) -> None:
    assert ranks(2).run(read_own, what).values() == [9, 9]


def read_own_in_replicas(world: Any, what: str) -> int:
    stage, num_calls = make_stage(world, replicas=2), 0
    is_last = world.rank % 2 == 1
    loader = [torch.full((4, 6), 1.0 + world.rank, dtype=torch.float64)] * 3
    for x in stage.batches(loader, sharded=True) if what != "not sharded" else loader:
        if is_last and what == "own":
            x = loader[0]
        elif is_last and what == "of its replica's first":
            x = loader[0] - 1
        stage(x)
        num_calls += 1
    return num_calls


def test_replicas_that_read_their_own_are_compared_with_their_first(ranks: Any) -> None:
    assert ranks(4).run(read_own_in_replicas, "sharded").values() == [3] * 4
    assert ranks(4).run(read_own_in_replicas, "of its replica's first").values() == [3] * 4
    for error in ranks(4).run(read_own_in_replicas, "own").errors():
        assert "rank 1 (stage 1 of replica 0) passes another input than rank 0 (" in error.text
        assert "rank 3 (stage 1 of replica 1) passes another input than rank 2 (" in error.text


def test_without_own_loaders_replicas_are_compared_with_rank_0(ranks: Any) -> None:
    for error in ranks(4).run(read_own_in_replicas, "not sharded").errors():
        for rank in (1, 2, 3):
            assert f"rank {rank} (" in error.text
        assert error.text.count("another input than rank 0 (stage 0 of replica 0)") == 3


class CountCalls(TorchFunctionMode):
    """Counts the calls of a torch function that only a checksum makes here."""

    num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func is Tensor.bitwise_xor_
        return func(*args, **(kwargs or {}))


def calls_with_checksums(world: Any) -> list[int]:
    stage, found = make_stage(world), []
    for k in range(1, 10):
        with CountCalls() as counted:
            stage(torch.ones(4, 6, dtype=torch.float64))
        found += [k] if counted.num_calls else []
    return found


def test_inputs_are_read_in_few_calls_only(ranks: Any) -> None:
    assert ranks(2).run(calls_with_checksums).values() == [[1, 2, 4, 8]] * 2
    assert ranks(1).run(calls_with_checksums).values() == [[]]
