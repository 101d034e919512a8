"""Parameter groups without a parameter on some stage, on any number of stages and replicas.

Truth is an undisturbed run of the plain ``nn.Sequential`` in float64: its parameters, and all
options of all its groups, which every rank must have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage, state
from procpipe.state import groups, optimizers
from tests.dist.stages import plain_step, stage_of

#: In turn: processes, replicas, balance. The middle layers have no vectors, the last is the head.
CUTS = [(2, 1, [3, 2]), (3, 1, [1, 3, 1]), (1, 1, [5]), (4, 2, [4, 1]), (2, 1, [1, 4])]
STEPS = 2

SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2, 0.3, 0.4], 40),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
}


def make_model(has_ties: bool) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 4), *[nn.Linear(4, 4, bias=False) for _ in range(3)], nn.Linear(4, 4)]
    if has_ties:
        layers[3].weight = layers[1].weight
    layers[2].requires_grad_(False)
    return nn.Sequential(*layers).double()


def make_optimizer(module: nn.Module, kind: Any, scale: float = 1.0) -> torch.optim.Optimizer:
    """Return an optimizer with four groups; the last is empty everywhere."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    body = [p for name, p in named if not name.startswith("4.")]
    optimizer: torch.optim.Optimizer = kind(
        [
            {"params": [p for p in body if p.ndim > 1], "weight_decay": 0.1 * scale},
            {"params": [p for p in body if p.ndim == 1], "weight_decay": 0.0},
            {"params": [p for name, p in named if name.startswith("4.")], "lr": 0.2 * scale},
        ],
        lr=0.05 * scale,
    )
    optimizer.add_param_group({"params": [], "lr": 0.3 * scale})
    return optimizer


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizers.options_of(group) for group in optimizer.param_groups]


def train(module, optimizer, scheduler, first):
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        if isinstance(module, Stage):
            module.step(x, x)
        else:
            plain_step(module, (x,), x, 2, F.mse_loss)
        optimizer.step()
        scheduler.step()


def go_on(bare, folder, turn, case):
    """Load what the turn before has saved, train, compare with the plain model, and save."""
    kind, scheduler_name, has_ties = case
    model = make_model(has_ties)
    plain = make_model(has_ties)
    plain_optimizer = make_optimizer(plain, kind)
    plain_scheduler = SCHEDULERS[scheduler_name](plain_optimizer)
    for earlier in range(turn + 1):
        train(plain, plain_optimizer, plain_scheduler, earlier * STEPS)
    _, replicas, balance = CUTS[turn]
    with stage_of(
        bare, f"{folder} {turn}", model, balance, chunks=2, replicas=replicas, loss_fn=F.mse_loss
    ) as stage:
        optimizer = make_optimizer(stage, kind, 30.0 if turn else 1.0)
        scheduler = SCHEDULERS[scheduler_name](optimizer)
        if turn:
            state.load(folder, stage, optimizer, extra={"scheduler": scheduler})
        train(stage, optimizer, scheduler, turn * STEPS)
        assert options(optimizer) == options(plain_optimizer), f"{turn}: {balance}"
        for key, value in stage.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-11, atol=1e-12)
        state.save(folder, stage, optimizer, extra={"scheduler": scheduler})


@pytest.mark.parametrize(
    "case",
    [
        (torch.optim.AdamW, "lambda", False),
        (torch.optim.AdamW, "one cycle", True),
        (torch.optim.SGD, "cosine", True),
    ],
    ids=["adamw", "adamw-tied", "sgd-tied"],
)
def test_every_rank_has_the_options_of_every_group(ranks, tmp_path, case):
    for turn, (num_ranks, _, _) in enumerate(CUTS):
        ranks(num_ranks).run(go_on, str(tmp_path), turn, case, world=False).values()


def save_other_rates(bare, folder):
    """Save with other rates of group 0 on rank 1, where group 1 is empty."""
    with stage_of(bare, "disagree", make_model(False), [2, 3]) as stage:
        optimizer = make_optimizer(stage, torch.optim.SGD)
        optimizer.param_groups[0]["lr"] = 0.5 + bare.rank
        state.save(folder, stage, optimizer)


def test_ranks_that_disagree_on_a_group_are_refused(ranks, tmp_path):
    first, second = ranks(2).run(save_other_rates, str(tmp_path), world=False).errors()

    assert first.is_a("ValueError")
    for error in (first, second):
        assert "group 0 of the optimizer has lr = 0.5 on rank 0 and 1.5 on rank 1" in error.text


def facts(*members: str | None, lr: float = 0.1) -> groups.Facts:
    return {
        f"0.{g}": (name, {"lr": repr(lr)} if name is not None else {})
        for g, name in enumerate(members)
    }


def test_an_empty_group_takes_the_options_of_the_first_rank_with_a_parameter():
    sources, faults = groups.match([facts("a", None, None), facts("b", "c", None)])

    assert sources == {"0.0": (0, "a"), "0.1": (1, "c"), "0.2": (0, None)}
    assert faults == []


def test_ranks_without_empty_groups_may_have_groups_of_their_own():
    for other in (facts("c", "d", lr=0.2), facts("c", lr=0.2)):
        assert groups.match([facts("a", "b"), other])[1] == []
    assert len(groups.match([facts("a", None), facts("c", "d", lr=0.2)])[1]) == 1
