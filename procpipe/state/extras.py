"""What a user saves besides model and optimizer: plain values, and objects with a state.

    extra = {"epoch": 3, "loader": Resumable(…), "scheduler": scheduler}

    extra.epoch  extra.loader  extra.scheduler        rank 0's
    ranks.1.extra.epoch  ranks.1.extra.scheduler      rank 1's; not the loader, which rank 0 reads

On the same number of stages with the same balance each rank gets its own values back. Otherwise
rank 0's count. A value that has another form or other tensors on another rank belongs to its stage
and is refused; so is a learning rate scheduler with other numbers, since it holds the rates of its
own stage's parameter groups.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from procpipe.state.archives import saved_copy
from procpipe.state.resumable import Resumable

#: What ``extra=`` takes; plain values in it are replaced by what was saved.
Extra = MutableMapping[str, Any]


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def snapshot(extra: Extra | None, rank: int) -> dict[str, Any]:
    """Return copies of the values, and of the objects' states, by key.

    Raises:
        TypeError: a value that could not be loaded again.
    """
    found = {}
    for name, value in (extra or {}).items():
        if isinstance(value, Resumable) and rank > 0:
            continue
        state = value.state_dict() if isinstance(value, _HasState) else value
        found[key_of(name, rank)] = saved_copy(f"extra[{name!r}]", state)
    return found


def key_of(name: str, rank: int) -> str:
    """Return the key of a rank's value of a name."""
    return f"extra.{name}" if rank == 0 else f"ranks.{rank}.extra.{name}"


def load_extra(extra: Extra, name: str, value: Any) -> None:
    """Give an object its state, or replace a plain value."""
    current = extra[name]
    if isinstance(current, _HasState):
        current.load_state_dict(value)
    elif isinstance(current, Tensor) and isinstance(value, Tensor):
        extra[name] = value.to(current.device)
    else:
        extra[name] = value


def difference_of_groups(ours: Any, theirs: Any, rank: int) -> str:
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


def differs(ours: Any, theirs: Any, *, may_numbers: bool) -> bool:
    """Return whether two values have different forms or tensors, or numbers if these may not."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.dtype != theirs.dtype or not torch.equal(ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        ours, theirs = list(ours.values()), [theirs[key] for key in ours]
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) != len(theirs) or any(
            differs(one, other, may_numbers=may_numbers)
            for one, other in zip(ours, theirs, strict=True)
        )
    if any(isinstance(value, (Tensor, dict, list, tuple)) for value in (ours, theirs)):
        return True
    return not may_numbers and bool(ours != theirs)
