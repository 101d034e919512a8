"""Invalid arguments raise a clear error on every rank."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from procpipe import Stage
from procpipe.job.world import World


def layers(count: int = 4) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


def build(world: World, case: str) -> None:
    arguments: dict[str, Any] = {"balance": [2, 2]}
    model: Any = nn.Sequential(*layers())
    if case == "not a Sequential":
        model = nn.ModuleList(layers())
    elif case == "chunks":
        arguments["chunks"] = 0
    elif case == "mode":
        arguments["checkpoint"] = "sometimes"
    elif case == "zeros":
        arguments["balance"] = [4, 0]
    elif case == "sum":
        arguments["balance"] = [2, 1]
    elif case == "more partitions":
        arguments["balance"] = [2, 1, 1]
    elif case == "fewer partitions":
        arguments["balance"] = [4]
    stage = Stage(model, world=world, **arguments)
    stage(torch.ones(2, 2))


CASES = {
    "not a Sequential": ("TypeError", "nn.Sequential"),
    "chunks": ("ValueError", "chunks is 0"),
    "mode": ("ValueError", "'sometimes'"),
    "zeros": ("BalanceError", "[4, 0]"),
    "sum": ("BalanceError", "[2, 1]"),
    "more partitions": ("IndexError", "there are 2 processes"),
    "fewer partitions": ("BalanceError", "there are 2 processes"),
}


def test_every_rank_ends_in_seconds_with_one_error(ranks: Any) -> None:
    for case, (error, words) in CASES.items():
        start_s = time.monotonic()
        failures = ranks(2).run(build, case).errors()
        # A rank that still connects may get the other one's error.
        assert {failure.type for failure in failures} - {"RemoteStageError"} == {error}, case
        for failure in failures:
            assert words in failure.text, case
        assert time.monotonic() - start_s < 10, case
