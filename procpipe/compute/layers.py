"""Calls the layers of a partition, one after the other, and checks what they do to its edges.

    inputs, skip tensors ─> layer ─> layer ─> … ─> loss_fn ─> output, skip tensors

It knows which layer runs, so that errors and the board name it. Independent of tasks, and of
whether autograd records what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.skips import SkipPorts
from procpipe.errors import BoundaryError, RecomputeError
from procpipe.skip.skippable import declared
from procpipe.skip.tracker import tracking
from procpipe.tree import TENSOR, Structure, flatten, in_words, is_plain

#: What the last stage of a ``step`` does to a micro-batch's output: ``loss_fn(output, target)``.
Finish = Callable[[Any], Any]

#: The longest text that a board takes of a place.
_MAX_SHOWN = 128

#: What leaves for one partition: its tensors, and the structure that they are in.
Leaving = tuple[list[Tensor], Structure]


class Layers:
    """The layers of a partition, by their names in the full model.

    The model's first layer takes several inputs; the output of the last partition need not travel.
    Every tensor at the edges must be on ``device``. ``board.page.layer`` names the layer that runs.

    Attributes:
        named: the names and layers.
        places: the layers in words, then the loss.
        changes_input: whether the first layer may change its input in place.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        device: torch.device,
        *,
        is_first: bool,
        is_last: bool = True,
        skips: SkipPorts | None = None,
        board: Any = None,
    ) -> None:
        self.named = dict(layers)
        self.places = [f"layer {name!r} ({type(layer).__name__})" for name, layer in layers.items()]
        self._calls: list[Callable[[Any], Any]] = [*layers.values()]
        if is_first and not layers:  # the model has none
            self.places, self._calls = ["no layer"], [_passed_on]
        if is_first:
            self._calls[0] = partial(_spread, self._calls[0])
        self.places.append("loss_fn")
        self._shown = [place[:_MAX_SHOWN] for place in self.places]
        self._board: Any = board or SimpleNamespace(page=SimpleNamespace())
        self.changes_input = bool(layers) and any(
            getattr(module, "inplace", False) for module in next(iter(layers.values())).modules()
        )
        self.device = device
        self.is_first = is_first
        self._current = -1
        self._is_last = is_last
        self._skips = skips or SkipPorts({}, 0)
        self._has_skips = bool(self._skips.entering or self._skips.leaving) or any(
            any(declared(layer)) for layer in layers.values()
        )

    def run(
        self, values: Sequence[Any], finish: Finish | None, watched: Sequence[Tensor] = ()
    ) -> list[Leaving]:
        """Run the layers.

        Args:
            values: what comes from the partition before, or the model's inputs; then the skip
                tensors of each source.
            finish: called last, with the output.
            watched: tensors that no layer may change in place; none of inference mode.

        Returns:
            The output, then the skip tensors for each destination.
        """
        value, *entered = values
        if self._has_skips:
            tracker = self._skips.tracker(entered)
            with tracking(tracker):
                value = self._run_layers(value, finish, watched)
            made = [value, *self._skips.messages(tracker)]
        else:
            made = [self._run_layers(value, finish, watched)]
        leaving = []
        for one in made:
            tensors, structure = ([one], TENSOR) if type(one) is Tensor else flatten(one)
            if '"procpipe.NoChunk"' in structure[0]:
                raise BoundaryError(
                    f"{self.where()} returned, or a layer before it stashed, a NoChunk, which is "
                    "for a mini-batch's inputs and target: return the tensor"
                )
            for tensor in tensors:
                self._check_can_leave(tensor)
            leaving.append((tensors, structure))
        self._current = -1
        self._board.page.layer = ""
        return leaving

    def _run_layers(self, value: Any, finish: Finish | None, watched: Sequence[Tensor]) -> Any:
        versions = [tensor._version for tensor in watched]
        for k, call in enumerate(self._calls if finish is None else [*self._calls, finish]):
            self._current = k
            self._board.page.layer = self._shown[k]
            try:
                value = call(value)
            except Exception as error:
                error.add_note(f"procpipe: {self.where()} was given {in_words(value)}")
                raise
            if watched and versions != [tensor._version for tensor in watched]:
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

    def where(self) -> str:
        """Name the layer that is running, or that raised."""
        return self.places[self._current] if self._current >= 0 else "between layers"


def _spread(layer: Callable[..., Any], inputs: Any) -> Any:
    """Call the model's first layer with its inputs: positional, or a dict by position and name."""
    if isinstance(inputs, tuple):
        return layer(*inputs)
    positional = [value for key, value in inputs.items() if isinstance(key, int)]
    return layer(*positional, **{k: value for k, value in inputs.items() if isinstance(k, str)})


def _passed_on(*inputs: Any) -> Any:
    """Stand in for the layers of a model that has none."""
    return inputs[0] if len(inputs) == 1 else inputs
