"""Makes a recomputed forward task equal to the first one, and lets a layer distinguish the two.

A forward task depends on more than inputs and parameters: on random number generators, autocast,
training modes and buffers. ``Ambient`` keeps all but the last; ``compute.buffers`` copies the
buffers.

``torch.utils.checkpoint`` does the same for one function call; here forward, recomputation and
backward are three tasks of a plan, with tasks of other micro-batches between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.generators import (
    RandomSource,
    are_equal,
    generators_of_libraries,
    generators_of_torch,
)

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
def recomputing(ambient: Ambient) -> Iterator[None]:
    """Run the same forward again, with a graph, in the ambient state of the first."""
    token = _phase.set("recomputing")
    try:
        with torch.enable_grad(), ambient.restored():
            yield
    finally:
        _phase.reset(token)


def sum_of_versions(tensors: Iterable[Tensor]) -> int:
    """Return a number that rises with each change in place of any of these tensors.

    Parameters and buffers must be at R as the last forward left them. Without recomputation
    autograd refuses such a backward pass; with it, the gradients would be those of another
    function. Changes by layers in their own forwards (``nn.Embedding(max_norm=…)``) are allowed. A
    change past autograd (``weight.data``, the fused optimizers of torch 2.13) raises no version.
    """
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn off autocast for a backward pass, where a user has it on around a whole ``step``.

    Autograd repeats the dtypes of the forward pass; autocast would cast other operations too.
    """
    enabled = [on for on in _device_types(device) if torch.is_autocast_enabled(on)]
    if not enabled:
        return nullcontext()
    stack = ExitStack()
    for device_type in enabled:
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


@dataclass
class Ambient:
    """The state of random number generators, of autocast and of modules at one moment."""

    device: torch.device
    random_states: list[tuple[RandomSource, Any]]  # torch's generators and their states
    library_states: list[tuple[RandomSource, Any]]  # Python's and NumPy's
    modes: tuple[Sequence[nn.Module], list[bool]]  # modules, and whether each is in training mode
    #: ``(device type, enabled, dtype, cache enabled)`` of the CPU and the device.
    autocasts: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @property
    def is_autocast(self) -> bool:
        """Whether autocast is on."""
        return any(enabled for _, enabled, _, _ in self.autocasts)

    @classmethod
    def now(cls, device: torch.device, modules: Sequence[nn.Module] = ()) -> Ambient:
        """Return the present state."""
        return cls(
            device,
            _states(generators_of_torch(device)),
            _states(generators_of_libraries()),
            (modules, _modes(modules)),
            _autocasts(device),
        )

    def forget_undrawn(self, later: Ambient | None = None) -> None:
        """Forget the states of Python's and NumPy's generators that the forward left as they were.

        To read and set these takes longer than for torch's, and few layers draw from them. So they
        are compared with those that a ``later`` forward has read, or else with the present ones.
        """
        then = _states(generators_of_libraries()) if later is None else later.library_states
        self.library_states = [
            (source, state)
            for (source, state), (_, left) in zip(self.library_states, then, strict=False)
            if not are_equal(state, left)  # then NumPy may have been loaded, as the last
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state for a while; afterwards everything is as before."""
        states = [*self.random_states, *self.library_states]
        present = _states(source for source, _ in states)
        modules, modes = self.modes
        present_modes = _modes(modules)
        with ExitStack() as stack:
            if modes != present_modes:  # a user may call eval() before backward()
                _set_modes(modules, modes)
                stack.callback(_set_modes, modules, present_modes)
            if self.autocasts != _autocasts(self.device):
                for device_type, enabled, dtype, cache in self.autocasts:
                    stack.enter_context(
                        torch.autocast(
                            device_type, dtype=dtype, enabled=enabled, cache_enabled=cache
                        )
                    )
            try:
                for source, state in states:
                    source.set(state)
                yield
            finally:
                for source, state in present:
                    source.set(state)


def _states(sources: Iterable[RandomSource]) -> list[tuple[RandomSource, Any]]:
    return [(source, source.get()) for source in sources]


def _modes(modules: Iterable[nn.Module]) -> list[bool]:
    return [module.training for module in modules]


def _set_modes(modules: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    for module, is_training in zip(modules, modes, strict=True):
        module.training = is_training


def _autocasts(device: torch.device) -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        (on, torch.is_autocast_enabled(on), torch.get_autocast_dtype(on), cache)
        for on in _device_types(device)
    )


def _device_types(device: torch.device) -> tuple[str, ...]:
    """Return the device types whose autocast matters on a device."""
    return ("cpu",) if device.type == "cpu" else ("cpu", device.type)
