"""Buffers that a layer changes in its forward (running statistics) under recomputation.

The first forward changes them, as in the plain model. Recomputation starts from the same values and
must not change them again, so it runs on copies, lent to the modules for the time:

    F(i)    copy what changes ──> forward on the buffers themselves
    R(i)    lend the copies   ──> forward on the copies ──> the buffers are back, unchanged

Old values are not written back: autograd may have saved the buffer, and refuses a backward pass
through a tensor that was written to. The first forward shows which buffers change; running
statistics always count, since batch normalisation's kernels do not raise their version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from procpipe.compute.recompute import NOTHING

#: Where a buffer is: the module, and its name there. It may be None until a forward sets it.
BufferPlace = tuple[nn.Module, str]

#: Copies of changing buffers.
BufferCopies = dict[BufferPlace, Tensor | None]


class Buffers:
    """The buffers of a partition's layers, which are given by their names in the full model.

    Attributes:
        places: where there were buffers, in the order of the layers' modules.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.places: list[BufferPlace] = []
        self._names: dict[BufferPlace, str] = {}
        self._changing: set[BufferPlace] = set()
        self._steady: dict[BufferPlace, tuple[Tensor | None, int]] = {}
        for layer_name, layer in layers.items():
            for module_name, module in layer.named_modules(prefix=layer_name):
                for name in module._buffers:
                    self.places.append((module, name))
                    self._names[module, name] = f"{module_name}.{name}"
                    if "running_mean" in module._buffers:
                        self._changing.add((module, name))
        self._is_known = not self._names

    def before_forward(self) -> BufferCopies:
        """Copy what recomputation will need, right before a first forward."""
        return _copies(self._changing if self._is_known else self._names)

    def after_forward(self, copies: BufferCopies) -> None:
        """Find what the very first forward has changed, given the copies made before it."""
        if not self._is_known:
            self._is_known = True
            self._changing.update(
                place
                for place in self._steady
                if self._has_changed(place) or not _same(copies[place], _buffer(place))
            )
            self.note_steady()

    def note_steady(self) -> None:
        """Note the buffers that no forward is known to change, as they are now."""
        self._steady = {
            place: (_buffer(place), _version(place))
            for place in self._names
            if place not in self._changing
        }

    def changed(self) -> list[str]:
        """Return the names of the buffers that have changed since they were noted as steady."""
        return [self._names[place] for place in self._steady if self._has_changed(place)]

    def _has_changed(self, place: BufferPlace) -> bool:
        buffer, version = self._steady[place]
        return _buffer(place) is not buffer or _version(place) != version

    def lent(self, copies: BufferCopies) -> AbstractContextManager[None]:
        """Let the modules work on copies for a while."""
        return _lent(copies) if copies else NOTHING


@contextmanager
def _lent(copies: BufferCopies) -> Iterator[None]:
    owned = {place: _buffer(place) for place in copies}
    for (module, name), copy in copies.items():
        module._buffers[name] = copy
    try:
        yield
    finally:
        for (module, name), buffer in owned.items():
            module._buffers[name] = buffer


def _buffer(place: BufferPlace) -> Tensor | None:
    module, name = place
    return module._buffers[name]


def _version(place: BufferPlace) -> int:
    buffer = _buffer(place)
    return -1 if buffer is None else buffer._version


def _copies(places: Iterable[BufferPlace]) -> BufferCopies:
    """Copy buffers; one that is in several places has one copy."""
    copies: dict[Tensor | None, Tensor | None] = {None: None}
    for place in places:
        buffer = _buffer(place)
        if buffer is not None and buffer not in copies:
            copies[buffer] = buffer.clone()
    return {place: copies[_buffer(place)] for place in places}


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
