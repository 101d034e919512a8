"""Calls the layers of a partition, one after the other, and checks what they do to its edges.

    inputs, skip tensors ─> layer ─> layer ─> … ─> loss_fn ─> output, skip tensors

It knows which layer runs, so that errors and the board name it, and detects layers that change what
others still need. Independent of tasks, and of whether autograd records what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.skips import SkipPorts
from procpipe.errors import BoundaryError, RecomputeError
from procpipe.skip.layout import SkipLayout
from procpipe.skip.tracker import tracking
from procpipe.tree import Flat, flatten, in_words, is_plain, unflatten

#: What the last stage of a ``step`` does to a micro-batch's output: ``loss_fn(output, target)``.
Finish = Callable[[Any], Any]


class PartitionLayers:
    """The layers of a partition, by their names in the full model.

    The model's first layer takes several inputs; the output of the last partition need not travel.
    Every tensor at the edges must be on ``device``.

    Attributes:
        named: the names and layers.
        on_layer: called with the index of each layer that begins, and with -1 after the last.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        device: torch.device,
        *,
        is_first: bool,
        is_last: bool = True,
        skips: SkipPorts | None = None,
    ) -> None:
        self.named = dict(layers)
        self.on_layer: Callable[[int], None] = lambda index: None
        self._calls: list[Callable[[Any], Any]] = [*layers.values()]
        self._current = -1
        self.device = device
        self.is_first = is_first
        self._is_last = is_last
        self._skips = skips or SkipPorts(SkipLayout(), 0)
        self._clone_inputs = bool(layers) and any(
            getattr(module, "inplace", False) for module in next(iter(layers.values())).modules()
        )

    def run(
        self,
        inputs: Flat,
        tensors: list[Tensor],
        finish: Finish | None,
        untouched: Sequence[Tensor] = (),
    ) -> Flat:
        """Run the layers on ``tensors``, in the structure of ``inputs``; return the output.

        ``untouched`` are the tensors that recomputation needs as they are now.
        """
        value = unflatten(tensors, inputs.structure)
        entered: list[Any] = []
        if self._skips.sources:
            value, *entered = value
        tracker = self._skips.tracker(entered)
        with tracking(tracker):
            value = self._run_layers(value, finish, untouched)
        self._skips.check(tracker)
        if self._skips.destinations:
            value = (value, *self._skips.messages(tracker))
        outputs, structure = flatten(value)
        for output in outputs:
            self._check_can_leave(output)
        self._enter(-1)
        return Flat(outputs, structure, tuple([output.requires_grad for output in outputs]))

    def _run_layers(self, value: Any, finish: Finish | None, untouched: Sequence[Tensor]) -> Any:
        versions = self.versions(untouched)
        spread = self.is_first
        if spread and not self.named:  # passes its inputs on
            value, spread = _passed_on(value), False
        for k, call in enumerate(self._calls if finish is None else [*self._calls, finish]):
            self._enter(k)
            try:
                value = _called(call, value) if spread else call(value)
            except Exception as error:
                if call is not finish:
                    error.add_note(f"procpipe: {self.where()} was given {in_words(value)}")
                raise
            spread = False
            if versions and versions != self.versions(untouched):
                raise RecomputeError(
                    f"{self.where()} changed its partition's input in place, so recomputing it "
                    "would start from the wrong values: make the change out of place (x = x + 1 "
                    "for x.add_(1)), let the partition begin at another layer, or use "
                    "checkpoint='never'"
                )
        return value

    def _check_can_leave(self, output: Tensor) -> None:
        if not (self._is_last or is_plain(output)):
            kind = type(output)
            raise BoundaryError(
                f"{self.where()} returned, or a layer before it stashed, a {kind.__module__}."
                f"{kind.__qualname__} of {output.dtype}, which would arrive in the next partition "
                "as a plain tensor: return plain ones (MaskedTensor.get_data() and get_mask(), "
                "DTensor.to_local(), x.dequantize(), x.as_subclass(torch.Tensor)), or let the "
                "partition end after the layer that uses it"
            )
        if output.device != self.device or output.layout != torch.strided:
            raise BoundaryError(
                f"{self.where()} returned a tensor on {output.device} with layout {output.layout}, "
                f"shape {tuple(output.shape)}: what leaves a stage must be a strided tensor on the "
                f"stage's device, {self.device}"
            )

    def versions(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return what rises when one of these inputs is changed in place.

        Empty where the first layer may do so: it works on copies of what is recomputed, but not of
        the last micro-batch, whose version is that of the whole mini-batch.
        """
        return [] if self._clone_inputs else [tensor._version for tensor in tensors]

    def unshared(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return inputs that the first layer may change although they are kept."""
        return [tensor.clone() for tensor in tensors] if self._clone_inputs else list(tensors)

    # -- faults ---------------------------------------------------------------------------------

    @property
    def places(self) -> list[str]:
        """The layers in words, then the loss, by the indices of ``on_layer``."""
        layers = [f"layer {name!r} ({type(layer).__name__})" for name, layer in self.named.items()]
        return [*layers, "loss_fn"]

    def where(self) -> str:
        """Name the layer that is running, or that raised."""
        return self.places[self._current] if self._current >= 0 else "between layers"

    def _enter(self, index: int) -> None:
        self._current = index
        self.on_layer(index)


def _passed_on(inputs: Any) -> Any:
    """Return the model's inputs as the first partition passes them on without a layer."""
    if isinstance(inputs, dict):
        raise ValueError(
            "named values go to the model's first layer, and the first partition has no layer: "
            "give it one (balance), or give the values by position"
        )
    return inputs[0] if len(inputs) == 1 else inputs


def _called(layer: Callable[..., Any], inputs: Any) -> Any:
    """Call the model's first layer with its inputs: positional, or a dict by position and name."""
    if isinstance(inputs, tuple):
        return layer(*inputs)
    positional = [value for key, value in inputs.items() if isinstance(key, int)]
    return layer(*positional, **{k: value for k, value in inputs.items() if isinstance(k, str)})
