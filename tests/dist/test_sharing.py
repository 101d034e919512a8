"""Tensors that share memory in the plain model, between processes; see ``compute/test_sharing``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from procpipe import Stage
from tests.compute.test_sharing import cases
from tests.dist.stages import MODES, assert_same, plain_step, world_of


def run_cases(bare: Any, mode: str, schedule: str, is_training: bool) -> list[str]:
    """Return for each case "" if the results equal the plain model's, or the error's text."""
    errors = []
    for name, case in cases().items():
        plain = nn.Sequential(*case.layers).double()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        num_partitions = bare.num_ranks * (2 if schedule == "zb-v" else 1)
        balance = {1: [4], 2: [1, 3], 4: [1, 1, 1, 1]}[num_partitions]
        stage = Stage(
            copy.deepcopy(plain),
            balance,
            chunks=2,
            checkpoint=mode,
            schedule=schedule,
            loss_fn=torch.mean,
            world=world_of(bare, name),
        )
        stage.train(is_training)
        with torch.set_grad_enabled(is_training):
            try:
                loss = stage.step(x, target=None)
            except RuntimeError as error:
                errors.append(str(error))
                continue
            in_order = schedule == "gpipe"
            expected = plain_step(plain, (x,), None, 2, torch.mean, is_backward_reversed=in_order)
        assert_same(loss, expected, f"{name}: loss", 1e-12)
        plain_parameters = dict(plain.named_parameters())
        for key, parameter in stage.named_parameters():
            gradient = plain_parameters[key].grad
            assert_same(parameter.grad, gradient, f"{name}: gradient of {key}", 1e-12)
        stage.close()
        errors.append("")
    return errors


@pytest.mark.parametrize(  # an evaluation recomputes nothing, in any mode
    ("mode", "is_training"), [*((mode, True) for mode in MODES), ("always", False)]
)
@pytest.mark.parametrize(("num_ranks", "schedule"), [(4, "gpipe"), (2, "zb-v")])
def test_a_change_of_shared_memory_is_right_or_reported(
    ranks: Any, mode: str, num_ranks: int, schedule: str, is_training: bool
) -> None:
    by_rank = ranks(num_ranks).run(run_cases, mode, schedule, is_training, world=False).values()
    for errors in by_rank:
        for (name, case), error in zip(cases().items(), errors, strict=True):
            if case.named is not None:
                assert f"layer '{case.named}'" in error, name
                assert "in place" in error, name
            elif error:  # any input that will be recomputed must not be changed
                assert is_training, name
                assert mode != "never", name
                assert "so recomputing it would start from the wrong values" in error, name
