"""Runs the layers of a model in order, each as a copy whose graph ends at its inputs.

    sample ──(1) copied ──(2) enter ── layer 0 ── roots ──(3) detached ──(2) enter ── layer 1 ── …
                                         │                                              ^
                                         └─(4) stashed, detached ───────────── popped ──┘

(1) The sample is copied, as a layer may change its input in place. (2) A layer's input is a node's
result, as in the plain model, so that it may be changed in place; a leaf may not. (3) No graph goes
from layer to layer, so a backward ends where the layer begins. (4) No graph goes along skip
tensors: a stashed one is a root of its layer, and a popped one is detached.

Only one layer is copied at a time, so a model need not fit on the device; for the meta device no
tensor is copied. Without a device, copies have shapes and no values, and the bytes of a CPU, as
kernels are chosen as there. The model, the sample and the random number generators do not change.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from procpipe.compute.generators import RandomStates, generators
from procpipe.compute.segment import Enter
from procpipe.skip.tracker import SkipKey, Tracker, tracking
from procpipe.torch_internals import without_values
from procpipe.tree import Flat, flatten

T = TypeVar("T")


class Inputs:
    """Several inputs of a model, where a single value is expected.

    ``balance_by_time(2, model, Inputs(tokens, mask=mask))`` profiles what ``stage(tokens,
    mask=mask)`` runs; a tuple would be the one input of ``stage((tokens, mask))``.
    """

    __slots__ = ("named", "values")

    def __init__(self, *values: Any, **named: Any) -> None:
        self.values = values
        self.named = named

    @classmethod
    def of(cls, sample: Any, module: nn.Sequential) -> Inputs:
        """Return a user's sample as the inputs of a model's first layer.

        A dict, or another Mapping, whose keys the layer takes as keywords is a batch for
        ``stage.step(**batch)``, where "labels" is the target; any other is one input.
        """
        if isinstance(sample, cls):
            return sample
        if isinstance(sample, Mapping) and len(module):
            named = {key: value for key, value in sample.items() if key != "labels"}
            try:
                inspect.signature(module[0].forward).bind(**named)
            except (TypeError, ValueError):
                return cls(sample)
            return cls(**named)
        return cls(sample)


class SkipCut(Tracker):
    """The skip tensors of one pass over all layers; takes the place of a stage's tracker."""

    def __init__(self) -> None:
        super().__init__()
        self._stashed: list[Tensor] = []

    def stash(self, key: SkipKey, tensor: Tensor | None, num_pops: int) -> None:
        """Keep a detached tensor for the ``num_pops`` layers that will pop it."""
        if tensor is not None:
            self._stashed.append(tensor)
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        super().stash(key, tensor, num_pops)

    def pop(self, key: SkipKey) -> Tensor | None:
        """Return the tensor to one of them."""
        tensor: Tensor | None = _enter(Flat.of(super().pop(key)))
        return tensor

    def waiting(self) -> dict[SkipKey, list[Tensor]]:
        """Return the tensors that are still to be popped, by key."""
        return {key: Flat.of(tensor).tensors for key, (tensor, _) in self._tensors.items()}

    def take_stashed(self) -> list[Tensor]:
        """Return the tensors stashed since the last call, with their graph."""
        stashed, self._stashed = self._stashed, []
        return stashed


class LayerAlone:
    """A copied layer and one input.

    Attributes:
        module: the copy, in training mode, on the device.
        cut: the skip tensors of the pass.
        index: its place in the model.
        inputs: its inputs' tensors.
        outputs: tensors that its forward made: outputs and stashed skip tensors.
    """

    def __init__(self, module: nn.Module, arguments: Flat, cut: SkipCut, index: int) -> None:
        self.module, self.index = module, index
        self.inputs = arguments.tensors
        self.outputs: list[Tensor] = []
        self.output: Any = None
        self.cut = cut
        self._arguments: tuple[Any, ...] = _enter(arguments)  # positional and named

    def forward(self) -> None:
        """Run the layer; only once, as its skip tensors are popped."""
        (arguments, named), self._arguments = self._arguments, ()
        self.output = self.module(*arguments, **named)
        self.outputs = flatten(self.output)[0] + self.cut.take_stashed()

    def roots(self) -> list[Tensor]:
        """Return the outputs from which a backward pass begins."""
        return [output for output in self.outputs if output.requires_grad]


def as_flat(sample: Any, module: nn.Sequential) -> Flat:
    """Flatten a user's sample as the positional and named inputs of a model's first layer."""
    inputs = Inputs.of(sample, module)
    return Flat.of((inputs.values, inputs.named))


def num_samples(inputs: Flat) -> int:
    """Return the size of a micro-batch, at least 1."""
    return next((len(tensor) for tensor in inputs.tensors if tensor.dim()), 1) or 1


def run_each(
    module: nn.Sequential,
    inputs: Flat,
    device: torch.device | None,
    measure: Callable[[LayerAlone], T],
    likeness: Callable[[nn.Module, Flat], Hashable] = lambda module, inputs: None,
) -> list[T]:
    """Call ``measure`` with each layer in order, and return the results.

    Args:
        module: the model, not changed.
        inputs: from :func:`as_flat`, not changed.
        device: where copies of layers and inputs are; None for copies without values.
        measure: must call the layer's ``forward`` once.
        likeness: of two layers with the same, unless it is None, the first one's result and output
            are those of both.
    """
    found: list[T] = []
    known: dict[Hashable, tuple[T, Flat]] = {}
    cut = SkipCut()
    is_empty = device is None
    device = device or torch.device("cpu")
    with (
        _surroundings(device),
        tracking(cut),
        without_values() if is_empty else nullcontext(),
    ):
        memo = _empty(module, device) if is_empty or device.type == "meta" else None
        copies = [
            _empty_like(tensor, device) if is_empty else tensor.detach().to(device, copy=True)
            for tensor in inputs.tensors
        ]
        arguments = Flat(copies, inputs.structure, inputs.requires_grad)
        for index, (name, original) in enumerate(module._modules.items()):
            assert original is not None, "nn.Sequential cannot run a child that is None"
            if (kind := likeness(original, arguments)) in known:
                result, arguments = known[kind]
                found.append(result)
                continue
            try:
                layer = LayerAlone(copy.deepcopy(original, memo).train(), arguments, cut, index)
                if memo is None:
                    layer.module.to(device)
                found.append(measure(layer))
                arguments = Flat.of(((layer.output,), {}))
                if kind is not None:
                    known[kind] = found[-1], arguments
            except Exception as error:
                where = "without values" if is_empty else f"on {device}"
                error.add_note(
                    f"while layer {name!r} ({type(original).__name__}) was profiled {where}"
                )
                raise
            del layer  # and so its graph, before the next is copied
            torch.clear_autocast_cache()  # it keeps casts of weights until the user's autocast ends
    return found


def _empty(module: nn.Module, device: torch.device) -> dict[int, Any]:
    """Return new tensors that ``copy.deepcopy`` takes for all those of a model."""
    memo: dict[int, Any] = {}
    for owner in module.modules():
        held = chain(owner._parameters.values(), owner._buffers.values(), vars(owner).values())
        for tensor in held:
            if isinstance(tensor, nn.Parameter):
                made = _empty_like(tensor, device)
                memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad)
            elif isinstance(tensor, Tensor):
                memo[id(tensor)] = _empty_like(tensor, device)
    return memo


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.layout != torch.strided:
        return torch.empty_like(tensor, device=device, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def _surroundings(device: torch.device) -> Iterator[None]:
    """Enable gradients, whatever the caller's mode, and restore the random number generators."""
    drawn_on = torch.device("cpu") if device.type == "meta" else device
    states = RandomStates(generators(drawn_on))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        states.put()


def _enter(flat: Flat) -> Any:
    """Return the value as in step (2); tensors that require gradients are results of a node."""
    given = list(zip(flat.tensors, flat.requires_grad, strict=True))
    entering = [tensor for tensor, requires_grad in given if requires_grad]
    entered: Iterator[Tensor] = iter(())
    if entering:
        anchor = torch.empty(0, device=entering[0].device, requires_grad=True)
        entered = iter(Enter.apply([], anchor, *entering))  # type: ignore[no-untyped-call]
    tensors = [next(entered) if requires_grad else tensor.data for tensor, requires_grad in given]
    return Flat(tensors, flat.structure, flat.requires_grad).value
