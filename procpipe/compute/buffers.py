"""Buffers that a layer changes in its forward (running statistics) under recomputation.

The first forward changes them, as in the plain model. Recomputation must find them as the first
forward did and must not change them again, so it runs on copies, lent to the modules for the time:

    F(i)    copy what changes ──> forward on the buffers themselves
    R(i)    lend the copies   ──> forward on the copies ──> the buffers are back, untouched

Lending beats writing old values back: autograd may have saved the buffer, and refuses a backward
pass through a tensor that was written to.

Which buffers change is seen at the first forward; running statistics count as changing always,
since batch normalisation's kernels change them without raising their version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from procpipe.errors import RecomputeError

__all__ = ["BufferCopies", "Buffers"]

#: Copies of changing buffers, by place: (module, buffer's name in it).
BufferCopies = dict[tuple[nn.Module, str], Tensor]


class Buffers:
    """The buffers of a partition.

    Args:
        layers: the layers by their names in the full model.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._places: dict[tuple[nn.Module, str], str] = {}
        self._changing: set[tuple[nn.Module, str]] = set()
        self._first: BufferCopies | None = None
        self._versions: list[int] = []
        for layer_name, layer in layers.items():
            for module_name, module in layer.named_modules(prefix=layer_name):
                self._register(module_name, module)
        self._is_known = not self._places

    def before_forward(self) -> BufferCopies:
        """Copy what recomputation will need, right before a first forward."""
        if not self._is_known:
            self._first = self._copies(self._places)
            return self._first
        self._versions = self._current_versions()
        return self._copies(self._changing)

    def after_forward(self) -> None:
        """See what the first forward changed.

        Raises:
            RecomputeError: a buffer changed that never did before, so that there is no copy.
        """
        if self._first is not None:
            for place, copy in self._first.items():
                if not _same(copy, _buffer(place)):
                    self._changing.add(place)
            self._first, self._is_known = None, True
        elif self._versions != self._current_versions():
            changed = [
                name
                for (place, name), version in zip(self._places.items(), self._versions, strict=True)
                if place not in self._changing and _buffer(place)._version != version
            ]
            if changed:
                raise RecomputeError(
                    f"buffer {changed[0]!r} changed in forward for the first time after earlier "
                    "micro-batches left it alone, so there is no copy to recompute from: change "
                    "it in every forward or in none, or use checkpoint='never'"
                )

    @contextmanager
    def lent(self, copies: BufferCopies) -> Iterator[None]:
        """Let the modules work on copies for a while."""
        owned = {place: _buffer(place) for place in copies}
        for (module, name), copy in copies.items():
            module._buffers[name] = copy
        try:
            yield
        finally:
            for (module, name), buffer in owned.items():
                module._buffers[name] = buffer

    def _register(self, module_name: str, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self._places[module, name] = f"{module_name}.{name}"
                if "running_mean" in module._buffers:
                    self._changing.add((module, name))

    def _copies(
        self, places: dict[tuple[nn.Module, str], str] | set[tuple[nn.Module, str]]
    ) -> BufferCopies:
        return {place: _buffer(place).clone() for place in places}

    def _current_versions(self) -> list[int]:
        return [_buffer(place)._version for place in self._places]


def _buffer(place: tuple[nn.Module, str]) -> Tensor:
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None, "a buffer was taken away while the pipeline ran"
    return buffer


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
