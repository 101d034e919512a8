"""What a user saves besides model and optimizer: plain values, and objects with a state.

    extra = {"epoch": 3, "loader": Resumable(…), "scheduler": scheduler}

Each rank saves its own; a Resumable on rank 0 only, which reads it. On the same number of stages
with the same balance each rank gets its own values back. Otherwise rank 0's count. A value that has
another form or other tensors on another rank belongs to its stage and is refused; so is a learning
rate scheduler with other numbers, since it holds the rates of its own stage's parameter groups.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from procpipe.state.resumable import Resumable
from procpipe.state.values import Stored, mapped, replaced, saved_form

#: What ``extra=`` takes; plain values in it are replaced by what was saved.
Extra = MutableMapping[str, Any]


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def saved_forms(extra: Extra | None, rank: int, faults: list[str]) -> dict[str, Any]:
    """Return the values, and the objects' states, as they are saved; note what cannot be."""
    found = {}
    for name, value in (extra or {}).items():
        if isinstance(value, Resumable) and rank > 0:
            continue
        state = value.state_dict() if _has_state(value) else value
        found[name] = saved_form(f"extra[{name!r}]", state, faults)
    return found


def load(extra: Extra, saved: Mapping[str, Any]) -> None:
    """Give objects their state, and replace plain values."""
    for name in extra.keys() & saved.keys():
        current, value = extra[name], replaced(saved[name], Stored, Stored.copy)
        if _has_state(current):
            current.load_state_dict(value)
        elif isinstance(current, Tensor) and isinstance(value, Tensor):
            extra[name] = value.to(current.device)
        else:
            extra[name] = value


def faults_of(
    extra: Extra, of_ranks: Sequence[Mapping[str, Any]], *, strict: bool, is_same_cut: bool
) -> list[str]:
    """Return what of ``extra`` was not saved, what else was, and what fits no other stages."""
    faults, saved = [], of_ranks[0]
    if strict:
        faults += [f"extra {name!r} was not saved" for name in extra if name not in saved]
        faults += [
            f"extra {name!r} was saved, but not asked for" for name in saved if name not in extra
        ]
    for name in () if is_same_cut else saved:
        if name in extra:
            faults += _carry_faults(name, extra[name], of_ranks)
    return faults


def _carry_faults(name: str, current: Any, of_ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why a value does not fit another number of stages, if it does not."""
    has_rates = isinstance(current, LRScheduler)
    what = "other learning rates" if has_rates else "other tensors"
    saved = [of_rank.get(name, of_ranks[0][name]) for of_rank in of_ranks]
    first, *others = (_parts_of(value, with_numbers=has_rates) for value in saved)
    for rank, theirs in enumerate(others, 1):
        for place in first | theirs:
            if not _is_same(first.get(place), theirs.get(place)):
                return [
                    f"extra {name!r} has another form, or {what}, on rank {rank} than on rank 0 "
                    f"(at {name}{place}), so it can be loaded only on {len(of_ranks)} stages with "
                    "the balance they had; leave it out, with strict=False"
                ]
    return []


def _parts_of(value: Any, *, with_numbers: bool) -> dict[str, Any]:
    """Return what must be equal in a nested value, by its place there."""
    found: dict[str, Any] = {}

    def add(leaf: Any, place: str) -> None:
        found[place] = leaf if with_numbers or isinstance(leaf, Stored) else "a value"

    mapped(value, add)
    return found


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, Stored) and isinstance(two, Stored):
        return one.dtype == two.dtype and torch.equal(one.get(), two.get())
    return bool(one == two)
