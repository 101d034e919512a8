"""What a recomputed forward has to have in common with the first; how layers see which it is.

A forward depends on more than inputs and parameters: on autocast, which is noted once a mini-batch
(``Autocast``), on random number generators (``generators.py``), and on buffers (``buffers.py``).

``torch.utils.checkpoint`` does the same for one function call; here forward, recomputation and
backward are three tasks of a plan, with tasks of other micro-batches between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar

import torch

_phase: ContextVar[str] = ContextVar("procpipe forward phase", default="plain")

#: A context that does nothing.
NOTHING: AbstractContextManager[None] = nullcontext()


def is_checkpointing() -> bool:
    """Return whether the forward that runs is the first of two: its graph is dropped.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_checkpointing``.
    """
    return _phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Return whether the forward that runs is repeated for the backward pass.

    What must happen once a micro-batch (counting, logging) belongs under ``not is_recomputing()``.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_recomputing``.
    """
    return _phase.get() == "recomputing"


class phase:  # noqa: N801 - a function that makes contexts; a generator takes three times as long
    """Runs a forward: ``"checkpointing"`` the first of two, ``"recomputing"`` the same again."""

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = _phase.set(self._name)

    def __exit__(self, *_: object) -> None:
        _phase.reset(self._token)


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

    def restored(self) -> AbstractContextManager[object]:
        """Cast as at that moment for a while: a user may leave it before ``backward()``."""
        return together(torch.autocast(*settings) for settings in self.settings)

    def off(self) -> AbstractContextManager[object]:
        """Turn autocast off for a backward pass, where a user has it on around a whole ``step``.

        Autograd repeats the dtypes of the forward pass; autocast would cast other operations too.
        """
        if not self.is_on:
            return NOTHING
        return together(torch.autocast(on, enabled=False) for on, *_ in self.settings)


def together(contexts: Iterable[AbstractContextManager[object]]) -> ExitStack:
    """Join contexts, which are entered now."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
