"""Options of parameter groups that are empty on some stages, and of parameters that stages share.

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
from typing import Any

from torch import Tensor

from procpipe.state.optimizers import Names, SavedOptimizers

#: A part of a rank's group with the same options: the index of its optimizer and its own; one of
#: its parameters, or None; the options, as plain JSON. Of a parameter that stages share None and
#: its name are in place of the indices.
Fact = Sequence[Any]

#: Of each group: the index of its optimizer and its own, and which parameter has the options that
#: an empty one takes; None if no rank has one.
Sources = list[list[Any]]


def facts_of(names: Names, saved: SavedOptimizers) -> list[Fact]:
    """Return the facts of this rank's groups, with options that were saved, or are to be."""
    facts: list[Fact] = []
    for group in names.groups():
        firsts: dict[int, str] = {}  # one object has the options that a group had
        for name in group.members:
            firsts.setdefault(id(saved.options.get(name)), name)
        options = {name: _plain(saved.options.get(name, {})) for name in firsts.values()}
        facts += [[*group.place, *each] for each in options.items()] or [[*group.place, None, {}]]
    return facts


def shared_facts(names: Names, saved: SavedOptimizers) -> list[Fact]:
    """Return the facts of this rank's parameters that other stages have, too."""
    groups = [(name, group.optimizer) for group in names.groups() for name in group.members]
    classes = {name: type(optimizer).__qualname__ for name, optimizer in groups}
    return [
        [None, name, name, {"class": classes.get(name)} | _plain(saved.options.get(name, {}))]
        for name in names.shared
        if names.optimizers
    ]


def match(of_ranks: Sequence[Sequence[Fact]]) -> tuple[Sources, list[str]]:
    """Return where the options of each group are, and what contradicts; on rank 0."""
    sources: Sources = []
    faults: list[str] = []
    at: dict[tuple[Any, Any], list[tuple[int, Any, Any]]] = {}
    for rank, facts in enumerate(of_ranks):
        for k, g, name, options in facts:
            at.setdefault((k, g), []).append((rank, name, options))
    for (k, g), found in at.items():
        found = [fact for fact in found if fact[1] is not None]
        # At loading, parameters that were not saved have no options.
        known = [fact for fact in found if fact[2]]
        sources.append([k, g, next((name for _, name, _ in known or found), None)])
        is_matched = _is_matched(k, of_ranks)
        for fact in known:
            first = next(one for one in known if is_matched or one[0] == fact[0])
            faults += list(_differences(k, g, first, fact))
    return sources, faults


def _is_matched(k: int | None, of_ranks: Sequence[Sequence[Fact]]) -> bool:
    """Return whether an optimizer has as many groups on all ranks, and an empty one on some.

    Otherwise ranks may have groups of their own, such as one for each layer.
    """
    of_k = [{(g, name) for j, g, name, _ in facts if j == k} for facts in of_ranks]
    is_same = all({g for g, _ in one} == {g for g, _ in of_k[0]} for one in of_k)
    return k is None or (is_same and any(name is None for one in of_k for _, name in one))


def _differences(
    k: int | None, g: Any, ours: tuple[int, Any, Any], theirs: tuple[int, Any, Any]
) -> Iterator[str]:
    (rank, name, one), (other_rank, other_name, other) = ours, theirs
    which = f"group {g} of " + (f"optimizer {k}" if k else "the optimizer")
    for option in sorted(one.keys() | other.keys()):
        value, other_value = one.get(option), other.get(option)
        if value == other_value:
            continue
        both = f"{option} = {value} on rank {rank} and {other_value} on rank {other_rank}"
        if k is None:
            yield (
                f"the optimizer has {g} with {both}, where it has another name: the ranks share "
                "it, so put it in a group with the same options"
            )
        elif rank == other_rank:
            yield (
                f"{which} holds {name}, saved with {option} = {value}, and {other_name}, saved "
                f"with {option} = {other_value}"
            )
        else:
            yield (
                f"{which} has {both}; since some group has no parameter on some rank, groups are "
                "matched by index: give each the same options on all ranks"
            )


def _plain(value: Any) -> Any:
    """Return options as plain JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    value = value.tolist() if isinstance(value, Tensor) else value
    return value if isinstance(value, (bool, int, float, str, list, type(None))) else repr(value)
