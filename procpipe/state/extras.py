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
from procpipe.state.values import copied, saved_form

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


def load_extra(extra: Extra, name: str, saved: Any) -> None:
    """Give an object its state, or replace a plain value."""
    current, value = extra[name], copied(saved)  # out of the file
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
        if name in theirs and _differs(first, theirs[name], may_numbers=not is_scheduler):
            return [
                f"extra {name!r} has another form, or {what}, on rank {rank} than on rank 0, so it "
                f"can be loaded only on {len(of_ranks)} stages with the balance they had"
                f"{_difference_of_groups(first, theirs[name], rank)}; leave it out, with "
                "strict=False"
            ]
    return []


def _difference_of_groups(ours: Any, theirs: Any, rank: int) -> str:
    """Describe the first group in which a rank's scheduler differs from rank 0's; "" if none."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return ""
    for name in ("base_lrs", "_last_lr"):
        one, other = ours.get(name), theirs.get(name)
        if not isinstance(one, list) or not isinstance(other, list):
            continue
        if len(one) != len(other):
            return (
                f" (the optimizer has {len(one)} groups on rank 0 and {len(other)} on rank {rank}: "
                "give all ranks as many, some of them empty)"
            )
        for g, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return f" ({name} of group {g} is {a} on rank 0 and {b} on rank {rank})"
    return ""


def _differs(ours: Any, theirs: Any, *, may_numbers: bool) -> bool:
    """Return whether two values have different forms or tensors, or numbers if these may not."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.dtype != theirs.dtype or not torch.equal(ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        ours, theirs = list(ours.values()), [theirs[key] for key in ours]
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) != len(theirs) or any(
            _differs(one, other, may_numbers=may_numbers)
            for one, other in zip(ours, theirs, strict=True)
        )
    if any(isinstance(value, (Tensor, dict, list, tuple)) for value in (ours, theirs)):
        return True
    return not may_numbers and bool(ours != theirs)
