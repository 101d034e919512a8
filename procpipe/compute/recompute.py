"""What makes a recomputed forward task equal to the first one, and how a layer can tell them apart.

A forward task depends on more than its inputs and parameters: on the random number generators (of
the CPU and of this stage's device), on autocast, and on buffers. ``Ambient`` remembers the first
two; buffers belong to the layers, so ``compute.tasks`` looks after them.

``torch.utils.checkpoint`` does the same for one function call; here forward, recomputation and
backward are three tasks of a plan, with other micro-batches' tasks between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Ambient",
    "checkpointing",
    "is_checkpointing",
    "is_recomputing",
    "recomputing",
    "without_autocast",
]

_phase: ContextVar[str] = ContextVar("procpipe forward phase", default="plain")


def is_checkpointing() -> bool:
    """Tell a layer whether its forward runs without a graph, to be recomputed later.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_checkpointing``.
    """
    return _phase.get() == "checkpointing"


def is_recomputing() -> bool:
    """Tell a layer whether its forward is being repeated for the backward pass.

    What must happen once a micro-batch (counting, logging) belongs under ``not is_recomputing()``.

    Source: torchgpipe 0.0.7, ``torchgpipe.is_recomputing``.
    """
    return _phase.get() == "recomputing"


@contextmanager
def checkpointing() -> Iterator[None]:
    """Run a first forward whose graph is not kept."""
    token = _phase.set("checkpointing")
    try:
        with torch.no_grad():
            yield
    finally:
        _phase.reset(token)


@contextmanager
def recomputing(ambient: Ambient) -> Iterator[None]:
    """Run the same forward again, with a graph, in the surroundings of the first."""
    token = _phase.set("recomputing")
    try:
        with torch.enable_grad(), ambient.restored():
            yield
    finally:
        _phase.reset(token)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn off a user's autocast around a whole ``step``, until the end of the ``with`` block.

    For backward: autograd repeats the dtypes of the forward pass by itself; under autocast it would
    also cast what the forward pass did not.
    """
    enabled = [kind for kind in _kinds(device) if torch.is_autocast_enabled(kind)]
    if not enabled:
        return nullcontext()
    stack = ExitStack()
    for kind in enabled:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@dataclass(frozen=True)
class Ambient:
    """The state of the random number generators and of autocast at one moment.

    Attributes:
        device: the stage's device, whose generator is kept beside the CPU's.
        random_states: the CPU's generator state and, on a GPU, the device's.
        autocasts: ``(device type, enabled, dtype, cache enabled)`` of the CPU and the device.
    """

    device: torch.device
    random_states: tuple[Tensor, ...]
    autocasts: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @classmethod
    def now(cls, device: torch.device) -> Ambient:
        """Take note of the present state."""
        return cls(device, _random_states(device), _autocasts(device))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring the state back for a while; afterwards the generators go on as if untouched."""
        present = _random_states(self.device)
        with ExitStack() as stack:
            if self.autocasts != _autocasts(self.device):
                for kind, enabled, dtype, cache in self.autocasts:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    )
            _set_random_states(self.device, self.random_states)
            try:
                yield
            finally:
                _set_random_states(self.device, present)


def _random_states(device: torch.device) -> tuple[Tensor, ...]:
    if device.type == "cuda":
        return (torch.get_rng_state(), torch.cuda.get_rng_state(device))
    return (torch.get_rng_state(),)


def _set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _autocasts(device: torch.device) -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
        for kind in _kinds(device)
    )


def _kinds(device: torch.device) -> tuple[str, ...]:
    """Return the device types whose autocast matters on a device."""
    return ("cpu",) if device.type == "cpu" else ("cpu", device.type)
