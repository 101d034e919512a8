"""Detects changes of parameters and buffers between a first forward and its recomputation.

    F(i)   ── note ───>  as the layers left them: parameters, buffers
           stage(x) has returned: optimizer.step(), load_state_dict(); or a hook of another
           micro-batch's backward pass has run an optimizer
    R(i)   <── fault ──  as they are now

Without recomputation autograd refuses such a backward pass, as what it saved was written to; with
it, the gradients would be those of another function. Changes by layers in their own forwards
(``nn.Embedding(max_norm=…)``) are allowed. A change past autograd (``weight.data``, the fused
optimizers of torch 2.13) raises no version, and is not detected.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from torch import Tensor, nn

from procpipe.compute.buffers import BufferPlace, Buffers


class OutsideChanges:
    """The versions of a partition's parameters and buffers."""

    def __init__(self, layers: Mapping[str, nn.Module], buffers: Buffers) -> None:
        self._layers = layers
        self._buffers = buffers
        self._parameters: list[Tensor] = []
        self._versioned: list[Tensor] = []
        self._noted: _State | None = None
        self._is_searched = False

    def begin(self, modules: Iterable[nn.Module]) -> tuple[bool, ...]:
        """Start a mini-batch; return which parameters of all modules require a gradient in it."""
        self._parameters = _parameters_of(modules)
        self._versioned = [p for p in self._parameters if not p.is_inference()]
        self._noted, self._is_searched = None, False
        return tuple(parameter.requires_grad for parameter in self._parameters)

    def note(self, *, is_repeated: bool) -> None:
        """Note the versions after a forward, if it or an earlier one will be recomputed."""
        if is_repeated or self._noted is not None:
            self._noted = self._now()

    def fault(self, lent: Container[BufferPlace]) -> str:
        """Return in words what was changed since the last forward, but for ``lent`` buffers."""
        assert self._noted is not None, "noted by the first forward"
        if not self._is_searched:  # once a mini-batch, as it takes much longer than the rest
            self._is_searched = True
            if self._has_replaced():
                return "a parameter was replaced by another"
        now = self._now()
        if now == self._noted:
            return ""
        versions, flags, buffers = self._noted
        pairs = [
            *zip(self._versioned, versions, now[0], strict=True),
            *zip(self._parameters, flags, now[1], strict=True),
        ]
        for parameter, before, after in pairs:
            if before != after:
                return f"parameter {self._name_of(parameter)!r} was changed"
        for place, version in buffers.items():
            if place not in lent and version != now[2][place]:
                return f"buffer {self._buffers.name_of(place)!r} was changed"
        return ""

    def _has_replaced(self) -> bool:
        """Return whether other parameters are there than at the start of the mini-batch."""
        there = _parameters_of(m for layer in self._layers.values() for m in layer.modules())
        return len(there) != len(self._parameters) or any(
            now is not before and not hasattr(before, "device_mesh")  # FSDP gathers a DTensor
            for now, before in zip(there, self._parameters, strict=True)
        )

    def _now(self) -> _State:
        return (
            [parameter._version for parameter in self._versioned],
            [parameter.requires_grad for parameter in self._parameters],
            self._buffers.versions(),
        )

    def _name_of(self, parameter: Tensor) -> str:
        return next(
            name
            for layer_name, layer in self._layers.items()
            for name, found in layer.named_parameters(layer_name)
            if found is parameter
        )


def _parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    # A parameter that several modules have is there several times.
    return [p for module in modules for p in module._parameters.values() if p is not None]


#: Parameters' versions, and whether they require gradients; buffers.
_State = tuple[list[int], list[bool], dict[BufferPlace, tuple[int, int]]]
