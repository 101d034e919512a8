"""Which options an empty parameter group takes, and on what ranks must agree.

That every rank gets the options of every group is in test_several_processes.py.
"""

from __future__ import annotations

from procpipe.state import groups


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
