"""The same call on every rank of a pipeline; or on a plain module, where there is one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from procpipe.run.calls import Calls
from procpipe.stage import Stage

#: ``agree(ours, combine)``: brings every rank's value, plain JSON, to rank 0, and what it makes of
#: the list of them, again plain JSON, to every rank.
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]


@contextmanager
def common_call(module: nn.Module, name: str) -> Iterator[Agree]:
    """Make a call on every rank; an exception in it on one rank ends it on all."""
    if not isinstance(module, Stage):
        yield lambda ours, combine: combine([ours])
        return
    with module._calls.together(name) as pipeline:
        module._order(name)
        yield pipeline.control.agree


def place_of(module: nn.Module) -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (module.rank, len(module.devices)) if isinstance(module, Stage) else (0, 1)


def split_of(module: nn.Module) -> dict[str, list[int]] | None:
    """Return how the layers are divided among the ranks, as plain JSON; None for a plain module."""
    if not isinstance(module, Stage):
        return None
    return {"balance": module.balance, "placement": module.placement}


def calls_of(module: nn.Module) -> Calls | None:
    """Return the calls of a stage's pipeline; None for a plain module."""
    return module._calls if isinstance(module, Stage) else None


def timeout_of(module: nn.Module) -> float:
    """Return how long a wait for another rank may last, in seconds."""
    return module._world._timeout_s if isinstance(module, Stage) else math.inf


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module is on."""
    if isinstance(module, Stage):
        return module.device
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def raise_faults(headline: str, faults: list[str]) -> None:
    """Raise the faults of all ranks, if there are any, as one error.

    Every rank does so at the same place, so the stage can still be used.
    """
    if faults:
        raise ValueError(headline + ":\n" + "\n".join(f"  - {fault}" for fault in faults))


def listing(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
