"""What a recomputed forward has to have in common with the first; how layers see which it is.

A forward depends on more than inputs and parameters: on autocast, which is noted once a mini-batch
(``Autocast``), on random number generators (``generators.py``), and on buffers (``buffers.py``).

``torch.utils.checkpoint`` does the same for one function call; here forward, recomputation and
backward are three tasks of a plan, with tasks of other micro-batches between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch

#: Which forward runs: ``"checkpointing"`` the first of two, ``"recomputing"`` the same again.
phase: ContextVar[str] = ContextVar("procpipe forward phase", default="plain")


def is_checkpointing() -> bool:
    """Return whether the forward that runs is the first of two: its graph is dropped.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_checkpointing``.
    """
    return phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Return whether the forward that runs is repeated for the backward pass.

    What must happen once a micro-batch (counting, logging) belongs under ``not is_recomputing()``.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_recomputing``.
    """
    return phase.get() == "recomputing"


class Autocast:
    """Autocast of the CPU and a device, at one moment.

    Attributes:
        settings: for ``torch.autocast``, of each of them.
        is_on: whether it casts anything.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.is_autocast_cache_enabled()
        self.settings = [
            (on, torch.get_autocast_dtype(on), torch.is_autocast_enabled(on), cache)
            for on in dict.fromkeys(("cpu", device.type))
        ]
        self.is_on = any(is_enabled for _, _, is_enabled, _ in self.settings)

    def restored(self) -> ExitStack:
        """Cast as at that moment for a while: a user may leave it before ``backward()``."""
        return _entered(self.settings)

    def off(self) -> ExitStack:
        """Turn autocast off for a backward pass, where a user has it on around a whole ``step``.

        Autograd repeats the dtypes of the forward pass; autocast would cast other operations too.
        """
        return _entered([(on, None, False) for on, *_ in self.settings if self.is_on])


def _entered(settings: Iterable[tuple[Any, ...]]) -> ExitStack:
    """Set autocast, until the result is closed."""
    stack = ExitStack()
    for each in settings:
        stack.enter_context(torch.autocast(*each))
    return stack
