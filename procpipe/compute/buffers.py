"""What layers' forwards change, under recomputation: buffers, such as running statistics.

The first forward changes them, as in the plain model. Recomputation starts from the same values and
must not change them again, so it runs on copies, lent to the modules for the time:

    F(i)    copy what changes ──> forward on the buffers themselves
    R(i)    lend the copies   ──> forward on the copies ──> the buffers are back, unchanged

Old values are not written back: autograd may have saved the buffer, and refuses a backward pass
through a tensor that was written to. The first forward shows which buffers change; running
statistics always count, since batch normalisation's kernels do not raise their version. Everything
else, the parameters included, must not change before it is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

#: Where a buffer is: the module, and its name there. It may be None until a forward sets it.
BufferPlace = tuple[nn.Module, str]

#: Copies of changing buffers.
BufferCopies = dict[BufferPlace, Tensor | None]


class Buffers:
    """The buffers, parameters and modes of a partition's layers, which are given by their names."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = layers
        self._modules: list[nn.Module] = []
        self._places: list[BufferPlace] = []
        self._parameters: list[nn.Parameter] = []
        self._is_known = False  # what a forward changes
        self._changing: set[BufferPlace] = set()
        self._changes_parameters = False  # whether a forward does, as nn.Embedding(max_norm=…)
        #: What must not change: the other buffers, each with its version; that of all parameters;
        #: the modes.
        self._steady: dict[BufferPlace, tuple[Tensor | None, int]] = {}
        self._version = 0
        self._modes: list[bool] = []

    def read(self) -> None:
        """Find what the layers have now, as a user may replace modules, and note it."""
        self._modules = modules = [m for layer in self._layers.values() for m in layer.modules()]
        # A parameter that several modules have is there several times.
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        places = [(module, name) for module in modules for name in module._buffers]
        if places != self._places:
            self._places, self._is_known = places, False
            self._changing = {place for place in places if "running_mean" in place[0]._buffers}
        self.note()

    def note(self) -> None:
        """Note what no forward is known to change, as it is now."""
        steady = (place for place in self._places if place not in self._changing)
        self._steady = {place: _state(place) for place in steady}
        self._version = self._version_now()
        self._modes = [module.training for module in self._modules]

    def before_forward(self) -> BufferCopies:
        """Copy what recomputation will need, right before a first forward."""
        places = self._changing if self._is_known else self._places
        if not places:
            return {}
        buffers = {place: _state(place)[0] for place in places}
        # One that is in several places has one copy.
        copies = {buffer: buffer.clone() for buffer in {*buffers.values()} if buffer is not None}
        return {
            place: None if buffer is None else copies[buffer] for place, buffer in buffers.items()
        }

    def after_forward(self, copies: BufferCopies) -> None:
        """Find what the very first forward has changed, given the copies made before it."""
        if not self._is_known:
            self._is_known = True
            self._changes_parameters = self._version != self._version_now()
            for place, (buffer, _) in self._steady.items():
                copy = copies[place]
                is_same = copy is None or buffer is None or copy.equal(buffer)
                if not is_same or self._has_changed(place):
                    self._changing.add(place)
            self.note()

    def changed(self, *, by_forward: bool) -> str:
        """Name what has changed since it was noted, "" if nothing has.

        ``by_forward``: whether a forward may have done it, which may change modes.
        """
        for module, name in filter(self._has_changed, self._steady):
            for layer_name, layer in self._layers.items():
                for module_name, each in layer.named_modules(prefix=layer_name):
                    if each is module:
                        return f"the buffer '{module_name}.{name}'"
        is_free = by_forward and self._changes_parameters
        if not is_free and self._version != self._version_now():
            return "a parameter"
        is_same = by_forward or self._modes == [module.training for module in self._modules]
        return "" if is_same else "the mode of a module (train(), eval())"

    def _has_changed(self, place: BufferPlace) -> bool:
        (before, version), (now, version_now) = self._steady[place], _state(place)
        return now is not before or version_now != version

    def _version_now(self) -> int:
        """Return a number that rises with each change in place of a parameter.

        A change past autograd (``weight.data``, the fused optimizers of torch 2.13) raises none.
        """
        return sum(each._version for each in self._parameters if not each.is_inference())


def put(buffers: BufferCopies) -> BufferCopies:
    """Let modules work on other buffers; return those that they had."""
    if not buffers:
        return buffers
    before = {place: _state(place)[0] for place in buffers}
    for (module, name), buffer in buffers.items():
        module._buffers[name] = buffer
    return before


def _state(place: BufferPlace) -> tuple[Tensor | None, int]:
    """Return a buffer, and its version, which rises when it is changed in place."""
    module, name = place
    buffer = module._buffers[name]
    return buffer, -1 if buffer is None else buffer._version
