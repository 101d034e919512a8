"""Parameter groups that have no parameter on some stage.

    groups                rank 0    rank 1    rank 2
    0  decay              a         b         c
    1  without decay      -         d         -        takes the options of d on ranks 0 and 2
    2  new layers         -         -         -        takes the options saved for group 2

Options are saved by parameter, so an empty group has none of its own. It takes those that a
parameter of the group of the same index has on another rank; if no rank has one, those that were
saved for the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from procpipe.state.optimizers import Names, texts_of

#: Of a rank's groups, by place ("<optimizer>.<index>"): a parameter, or None; its options as text.
Facts = Mapping[str, tuple[str | None, dict[str, str]]]

#: Of each group, by place: a rank, and which of its parameters has the options. None: no rank has
#: one; the rank is then 0.
Sources = dict[str, tuple[int, str | None]]


def facts_of(names: Names, saved: Mapping[str, dict[str, Any]] | None = None) -> Facts:
    """Return the facts of this rank's groups; with ``saved`` options, by parameter, of these."""
    facts = {}
    for k, g, group in names.groups():
        members = [name for name in names.in_group(group) if name is not None]
        if saved is not None:
            members.sort(key=lambda name: not saved[name])  # first those that were saved
            group = saved[members[0]] if members else {}
        facts[f"{k}.{g}"] = (members[0] if members else None, texts_of(group))
    return facts


def match(of_ranks: Sequence[Facts]) -> tuple[Sources, list[str]]:
    """Return where the options of each group are, and on what ranks disagree; on rank 0."""
    sources: Sources = {}
    faults = []
    for place in dict.fromkeys(chain.from_iterable(of_ranks)):
        having = [(rank, facts[place]) for rank, facts in enumerate(of_ranks) if place in facts]
        having = [(rank, (name, options)) for rank, (name, options) in having if name is not None]
        # At loading, parameters that were not saved have no options.
        having = [(rank, fact) for rank, fact in having if fact[1]] or having
        if not having:
            sources[place] = (0, None)
            continue
        first, (name, ours) = having[0]
        sources[place] = (first, name)
        if _are_matched(place.partition(".")[0], of_ranks):
            for rank, (_, theirs) in having[1:]:
                faults += list(_differences(place, (first, ours), (rank, theirs)))
    return sources, faults


def _are_matched(optimizer: str, of_ranks: Sequence[Facts]) -> bool:
    """Return whether an optimizer has as many groups on all ranks, and an empty one on some.

    Otherwise ranks may have groups of their own, such as one for each layer.
    """
    prefix = f"{optimizer}."
    of_ranks = [
        {p: fact for p, fact in facts.items() if p.startswith(prefix)} for facts in of_ranks
    ]
    is_same = all(facts.keys() == of_ranks[0].keys() for facts in of_ranks)
    return is_same and any(name is None for facts in of_ranks for name, _ in facts.values())


def _differences(
    place: str, ours: tuple[int, dict[str, str]], theirs: tuple[int, dict[str, str]]
) -> Iterator[str]:
    optimizer, _, index = place.partition(".")
    which = "the optimizer" if optimizer == "0" else f"optimizer {optimizer}"
    for option in sorted(ours[1].keys() | theirs[1].keys()):
        if ours[1].get(option) != theirs[1].get(option):
            yield (
                f"group {index} of {which} has {option} = {ours[1].get(option)} on rank {ours[0]} "
                f"and {theirs[1].get(option)} on rank {theirs[0]}; since some group has no "
                "parameter on some rank, groups are matched by index: give each the same options "
                "on all ranks"
            )
