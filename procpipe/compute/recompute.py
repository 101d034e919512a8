"""Makes a recomputed forward task equal to the first one, and lets a layer distinguish the two.

A forward task depends on more than inputs and parameters: on training modes and autocast, which are
noted once a mini-batch (``Surroundings``), on random number generators (``generators.py``), and on
buffers (``buffers.py``).

``torch.utils.checkpoint`` does the same for one function call; here forward, recomputation and
backward are three tasks of a plan, with tasks of other micro-batches between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

_phase: ContextVar[str] = ContextVar("procpipe forward phase", default="plain")


def is_checkpointing() -> bool:
    """Return whether the forward that runs keeps no graph, to be recomputed later.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_checkpointing``.
    """
    return _phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Return whether the forward that runs is repeated for the backward pass.

    What must happen once a micro-batch (counting, logging) belongs under ``not is_recomputing()``.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_recomputing``.
    """
    return _phase.get() == "recomputing"


@contextmanager
def checkpointing() -> Iterator[None]:
    """Run a first forward whose graph is not kept.

    Without a graph torch's attention would take another path in eval mode, with other rounding,
    and under autocast with an output of another dtype, than in recomputation and the plain model.
    """
    token = _phase.set("checkpointing")
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        _phase.reset(token)


@contextmanager
def recomputing() -> Iterator[None]:
    """Run the same forward again, with a graph."""
    token = _phase.set("recomputing")
    try:
        with torch.enable_grad():
            yield
    finally:
        _phase.reset(token)


#: ``(device type, enabled, dtype, cache enabled)`` of the CPU and the device.
_Autocasts = tuple[tuple[str, bool, torch.dtype, bool], ...]


@dataclass(frozen=True)
class Surroundings:
    """Modules, whether each is in training mode, and autocast, at one moment."""

    modules: Sequence[nn.Module]
    modes: Sequence[bool]
    autocasts: _Autocasts
    is_autocast: bool  # whether it is on

    @classmethod
    def now(cls, modules: Sequence[nn.Module], device: torch.device) -> Surroundings:
        """Return the present ones."""
        cache = torch.is_autocast_cache_enabled()
        autocasts = tuple(
            (on, torch.is_autocast_enabled(on), torch.get_autocast_dtype(on), cache)
            for on in dict.fromkeys(("cpu", device.type))
        )
        is_autocast = any(enabled for _, enabled, _, _ in autocasts)
        return cls(modules, [module.training for module in modules], autocasts, is_autocast)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore these for a while: a user may call ``eval()`` before ``backward()``."""
        present = [module.training for module in self.modules]
        with _autocast(self.autocasts):
            _set_modes(self.modules, self.modes)
            try:
                yield
            finally:
                _set_modes(self.modules, present)

    def without_autocast(self) -> AbstractContextManager[object]:
        """Turn off autocast for a backward pass, where a user has it on around a whole ``step``.

        Autograd repeats the dtypes of the forward pass; autocast would cast other operations too.
        """
        return _autocast((on, False, dtype, cache) for on, _, dtype, cache in self.autocasts)


#: A context that does nothing.
NOTHING: AbstractContextManager[None] = nullcontext()


def _autocast(autocasts: Iterable[tuple[str, bool, torch.dtype, bool]]) -> ExitStack:
    stack = ExitStack()
    for on, enabled, dtype, cache in autocasts:
        stack.enter_context(torch.autocast(on, dtype=dtype, enabled=enabled, cache_enabled=cache))
    return stack


def _set_modes(modules: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    for module, is_training in zip(modules, modes, strict=True):
        module.training = is_training
