"""Options of parameter groups: which one an empty group takes, and on what ranks must agree.

That loading gives every group of every rank its options is in test_several_processes.py.
"""

from __future__ import annotations

import torch
from torch import nn

from procpipe import state
from procpipe.state import groups
from tests.dist.stages import stage_of


def save_other_rates(bare, folder):
    """Save with other rates of group 0 on rank 1, where group 1 is empty."""
    with stage_of(bare, "disagree", nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1]) as s:
        weight, bias = s.parameters()
        others = [bias] if bare.rank == 0 else []
        optimizer = torch.optim.SGD([{"params": [weight]}, {"params": others}], lr=0.5 + bare.rank)
        state.save(folder, s, optimizer)


def test_ranks_that_disagree_on_a_group_are_refused(ranks, tmp_path):
    first, second = ranks(2).run(save_other_rates, str(tmp_path), world=False).errors()

    assert first.is_a("ValueError")
    for error in (first, second):
        assert "group 0 of the optimizer has lr = 0.5 on rank 0 and 1.5 on rank 1" in error.text


def facts(*members: str | None, lr: float = 0.1) -> list[groups.Fact]:
    return [[0, g, name, {"lr": lr} if name is not None else {}] for g, name in enumerate(members)]


def test_an_empty_group_takes_the_options_of_the_first_rank_with_a_parameter():
    sources, faults = groups.match([facts("a", None, None), facts("b", "c", None)])

    assert sources == [[0, 0, "a"], [0, 1, "c"], [0, 2, None]]
    assert faults == []


def test_ranks_without_empty_groups_may_have_groups_of_their_own():
    for other in (facts("c", "d", lr=0.2), facts("c", lr=0.2)):
        assert groups.match([facts("a", "b"), other])[1] == []
    assert len(groups.match([facts("a", None), facts("c", "d", lr=0.2)])[1]) == 1
