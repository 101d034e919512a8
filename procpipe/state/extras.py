"""What a user saves besides model and optimizer: plain values, and objects with a state.

    extra = {"epoch": 3, "loader": Resumable(…), "scheduler": scheduler}

Each rank saves its own; a Resumable on rank 0 only, which reads it. On the same number of stages
with the same balance each rank gets its own values back. Otherwise rank 0's count. A value that has
another form or other tensors on another rank belongs to its stage and is refused; so is a learning
rate scheduler with other numbers, since it holds the rates of its own stage's parameter groups.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from procpipe.state.resumable import Resumable
from procpipe.state.stored import Stored
from procpipe.state.values import replaced, saved_form

#: What ``extra=`` takes; plain values in it are replaced by what was saved.
Extra = MutableMapping[str, Any]


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def saved_forms(extra: Extra | None, rank: int, faults: list[str]) -> dict[str, Any]:
    """Return the values, and the objects' states, as they are saved; note what cannot be."""
    found = {}
    for name, value in (extra or {}).items():
        if isinstance(value, Resumable) and rank > 0:
            continue
        state = value.state_dict() if isinstance(value, _HasState) else value
        found[name] = saved_form(f"extra[{name!r}]", state, faults)
    return found


def load(extra: Extra, saved: Mapping[str, Any]) -> None:
    """Give objects their state, and replace plain values."""
    for name in [name for name in extra if name in saved]:
        current, value = extra[name], replaced(saved[name], Stored, Stored.read)
        if isinstance(current, _HasState):
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
    first, is_scheduler = of_ranks[0][name], isinstance(current, LRScheduler)
    what = "other learning rates" if is_scheduler else "other tensors"
    for rank, theirs in enumerate(of_ranks):
        both = first, theirs.get(name, first)
        if found := _difference("", *both, f"on rank {rank}", may_numbers=not is_scheduler):
            return [
                f"extra {name!r} has another form, or {what}, on rank {rank} than on rank 0, so it "
                f"can be loaded only on {len(of_ranks)} stages with the balance they had ({found}"
                "); leave it out, with strict=False"
            ]
    return []


def _difference(place: str, ours: Any, theirs: Any, where: str, *, may_numbers: bool) -> str:
    """Return in which form or tensor two values differ, or number if these may not; else ""."""
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        parts = [(f"{place}[{key!r}]", value, theirs[key]) for key, value in ours.items()]
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{place} has {len(ours)} entries on rank 0 and {len(theirs)} {where}"
        parts = [(f"{place}[{i}]", *both) for i, both in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, Stored) and isinstance(theirs, Stored):
        if ours.dtype != theirs.dtype or not torch.equal(ours.read(), theirs.read()):
            return f"{place} is another tensor"
    elif any(isinstance(value, (Stored, dict, list, tuple)) for value in (ours, theirs)):
        return f"{place} is of another kind"
    elif not may_numbers and ours != theirs:
        return f"{place} is {ours} on rank 0 and {theirs} {where}"
    inside = (_difference(*part, where, may_numbers=may_numbers) for part in parts)
    return next(filter(None, inside), "")
