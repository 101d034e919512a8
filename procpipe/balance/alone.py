"""Runs the layers of a model in order, yet each alone: a copy of it, cut off from the others.

    sample ──(1) copied ──(2) enter ── layer 0 ── roots ──(3) detached ──(2) enter ── layer 1 ── …
                                         │                                              ^
                                         └─(4) stashed, detached ───────────── popped ──┘

(1) The sample is copied, so a layer may change its input in place. (2) What a layer gets looks as
it does in the plain model: the result of an earlier layer, which may be changed in place, and not
a leaf, which may not. (3) No graph goes from layer to layer, so a backward pass from a layer's
roots ends where the layer begins. (4) Nor along a skip tensor: one that is stashed is a root of its
layer, and what is popped is cut off.

There is one copied layer at a time, so a model need not fit on the device as a whole. The model,
the sample and the random number generators stay as they are.

Knows nothing of time or bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from procpipe.skip.tracker import tracking
from procpipe.tree import Flat, flatten

T = TypeVar("T")


class Inputs:
    """Several positional inputs of a model, where a single value is expected.

    ``balance_by_time(2, model, Inputs(tokens, mask))`` profiles what ``stage(tokens, mask)`` runs;
    a tuple would be the one input of ``stage((tokens, mask))``.
    """

    __slots__ = ("values",)

    def __init__(self, *values: Any) -> None:
        self.values = values


class SkipCut:
    """The skip tensors of one pass over all layers, in the place of the tracker of a stage."""

    def __init__(self) -> None:
        self._stashed: list[Tensor] = []
        self._popped: list[GradientEdge] = []
        self._held: dict[Hashable, tuple[Flat, int]] = {}

    def stash(self, key: Hashable, tensor: Tensor | None, num_pops: int) -> None:
        """Keep a tensor, cut off the graph, for the ``num_pops`` layers that will pop it."""
        if tensor is not None:
            self._stashed.append(tensor)
        self._held[key] = Flat.of(tensor), num_pops

    def pop(self, key: Hashable) -> Tensor | None:
        """Give the tensor to one of them.

        Raises:
            RuntimeError: nothing is stashed under this key, or all have had it.
        """
        if key not in self._held:
            raise RuntimeError(
                f"skip tensor {key} is popped but was not stashed: see verify_skippables(module)"
            )
        flat, num_pops = self._held.pop(key)
        if num_pops > 1:
            self._held[key] = flat, num_pops - 1
        tensor: Tensor | None = _enter(flat)
        if tensor is not None and tensor.requires_grad:
            self._popped.append(get_gradient_edge(tensor))
        return tensor

    def waiting(self) -> dict[Hashable, list[Tensor]]:
        """Return the tensors that wait to be popped, by what they were stashed under."""
        return {key: flat.tensors for key, (flat, _) in self._held.items()}

    def take_stashed(self) -> list[Tensor]:
        """Return the tensors stashed since the last call, as they are in their layer's graph."""
        stashed, self._stashed = self._stashed, []
        return stashed

    def take_popped(self) -> list[GradientEdge]:
        """Return where gradients of the tensors popped since the last call come out."""
        popped, self._popped = self._popped, []
        return popped

    @property
    def held(self) -> list[Tensor]:
        """Tensors that wait to be popped."""
        return [tensor for tensors in self.waiting().values() for tensor in tensors]


class Layer:
    """A copied layer and one input.

    Attributes:
        module: the copy, in training mode, on the device.
        entering: its inputs' tensors.
        inputs: all tensors that exist before its forward: ``entering``, and skip tensors to be
            popped.
        outputs: tensors its forward made: outputs, and stashed skip tensors.
    """

    def __init__(self, module: nn.Module, arguments: Flat, cut: SkipCut) -> None:
        self.module = module
        self.entering = arguments.tensors
        self.inputs = [*self.entering, *cut.held]
        self.outputs: list[Tensor] = []
        self.output: Any = None
        self._cut = cut
        self._popped: list[GradientEdge] = []
        self._arguments: tuple[Any, ...] = _enter(arguments)

    def forward(self) -> None:
        """Run the layer once; a second time would not find the skip tensors it pops."""
        arguments, self._arguments = self._arguments, ()
        self.output = self.module(*arguments)
        self.outputs = flatten(self.output)[0] + self._cut.take_stashed()
        self._popped = self._cut.take_popped()

    def waiting_skips(self) -> dict[Hashable, list[Tensor]]:
        """Return the skip tensors that wait to be popped, by what they were stashed under."""
        return self._cut.waiting()

    def entries(self) -> list[GradientEdge]:
        """Return where the gradients of its inputs come out; to be called before its forward."""
        tensors, _ = flatten(self._arguments)
        return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]

    def gradients_up_to(self, ends: list[GradientEdge], gradients: list[Tensor]) -> None:
        """Run as much of the layer's backward pass as gradients at some places need.

        Those of the skip tensors it popped are needed in any case.

        Args:
            ends: the places.
            gradients: as ``output_gradients`` gave them.
        """
        ends = [*ends, *self._popped]
        if gradients and ends:
            torch.autograd.grad(self._roots(), ends, gradients, allow_unused=True)

    def output_gradients(self) -> list[Tensor]:
        """Return a gradient for each output that requires one."""
        return [torch.ones_like(root) for root in self._roots()]

    def backward(self, gradients: list[Tensor]) -> None:
        """Run the layer's backward pass, from gradients as ``output_gradients`` gave them."""
        if gradients:
            torch.autograd.backward(self._roots(), gradients)

    def _roots(self) -> list[Tensor]:
        return [output for output in self.outputs if output.requires_grad]


def as_flat(sample: Any) -> Flat:
    """Take apart what a user gave as the sample, as the first layer's positional inputs."""
    return Flat.of(sample.values if isinstance(sample, Inputs) else (sample,))


def run_each(
    module: nn.Sequential,
    inputs: Flat,
    device: torch.device,
    measure: Callable[[Layer], T],
) -> list[T]:
    """Run each layer alone, in order, each on what the one before it made.

    Args:
        module: the model, not changed.
        inputs: as :func:`as_flat` gives them, not changed.
        device: where the copies of layers and inputs live meanwhile.
        measure: called with each layer, whose ``forward`` it must run once.

    Returns:
        What ``measure`` returned for each layer.
    """
    found = []
    cut = SkipCut()
    with _surroundings(device), tracking(cut):
        copies = [tensor.detach().to(device, copy=True) for tensor in inputs.tensors]
        arguments = Flat(copies, inputs.structure, inputs.requires_grad)
        for name, original in module._modules.items():
            assert original is not None, "nn.Sequential cannot run a child that is None"
            try:
                layer = _alone(original, arguments, device, cut)
                found.append(measure(layer))
                arguments = Flat.of((layer.output,))
            except Exception as error:
                error.add_note(
                    f"while layer {name!r} ({type(original).__name__}) was profiled on {device}"
                )
                raise
            del layer  # and so its graph, before the next is copied
    return found


def _alone(original: nn.Module, arguments: Flat, device: torch.device, cut: SkipCut) -> Layer:
    return Layer(copy.deepcopy(original).to(device).train(), arguments, cut)


@contextmanager
def _surroundings(device: torch.device) -> Iterator[None]:
    """Build graphs, whatever the caller's mode; put the random number generators back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        yield


def _enter(flat: Flat) -> Any:
    """Return the value as results of a node where they require gradients."""
    tensors = [
        _Enter.apply(_anchor(tensor), tensor.data) if wanted else tensor.data  # type: ignore[no-untyped-call]
        for tensor, wanted in zip(flat.tensors, flat.requires_grad, strict=True)
    ]
    return Flat(tensors, flat.structure, flat.requires_grad).value


def _anchor(tensor: Tensor) -> Tensor:
    return torch.empty(0, device=tensor.device, requires_grad=True)


class _Enter(torch.autograd.Function):
    """Step (2), without copying.

    ``mark_dirty`` makes the very tensor the result, and not a view of it, which could not be
    changed in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
