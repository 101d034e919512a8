"""What each layer of a model costs, as a plan needs it: each kind of task, each kind of memory.

``profile.py`` has one number a layer, to divide layers by. Here seconds are told apart by task, and
bytes by where they lie, since which of them a stage holds depends on where the model is cut:

    input ──> [ layer ]──> output           a boundary if the model is cut here, else one value
                 │                          between two layers
                 └── kept inside: what autograd saves that is neither of them

Each is measured in passes of its own over all layers (``alone.py``), as hooks that count take time:

    1  once        bytes
    2  repeatedly  seconds of forward and backward, with gradients that are there to be added to
    3  repeatedly  seconds of the backward without the weights' gradients that can be put off

Knows nothing of plans, nor of more than one size of micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.balance.alone import Layer, as_flat, run_each
from procpipe.balance.halves import counting_put_off, noting_ends
from procpipe.balance.profile import (
    Memories,
    Timer,
    check_model,
    check_not_meta,
    device_of,
    leaves,
)
from procpipe.skip.skippable import declared
from procpipe.tree import Flat, flatten, map_tensors

_MIN_ROUNDS = 3

#: How often the start of a task is timed.
_NUM_STARTS = 25

_LOSS = "(loss)"  # no layer of a user's has brackets in its name, as no attribute has


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs on one micro-batch.

    Attributes:
        name: its name in the model.
        type: its class.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward, gradients added to those that are there.
        input_gradient_s: seconds of it without the weights' gradients that can be put off; all of
            it where there are none.
        output_bytes: its output.
        kept_bytes: what autograd keeps that is neither input nor output nor a skip tensor.
        kept_input_bytes: what autograd keeps of its input.
        kept_output_bytes: what autograd keeps of its output.
        put_off_bytes: inputs of its linear and convolution layers and of its attentions'
            projections, and gradients of their outputs: what is kept until the weights' gradients
            are computed.
        is_in_place: whether its output lies in the memory of its input.
        parameter_bytes: its parameters and buffers.
        trained_bytes: parameters that get a gradient.
    """

    name: str
    type: str
    forward_s: float
    backward_s: float
    input_gradient_s: float
    output_bytes: int
    kept_bytes: int
    kept_input_bytes: int
    kept_output_bytes: int
    put_off_bytes: int
    is_in_place: bool
    parameter_bytes: int
    trained_bytes: int


@dataclass(frozen=True)
class SkipProfile:
    """A skip tensor of one micro-batch.

    Attributes:
        source: the index of the layer that stashes it.
        destinations: the indices of the layers that pop it.
        tensor_bytes: its size.
        kept_bytes: what autograd keeps of it where it is popped.
    """

    source: int
    destinations: tuple[int, ...]
    tensor_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class Profile:
    """What a model costs on one micro-batch.

    Attributes:
        layers: its layers.
        loss: the loss function, as a last layer; None if there was none.
        skips: its skip tensors.
        input_bytes: the micro-batch's input.
        target_bytes: its target.
        start_s: seconds that a forward and a backward take whatever is in them; the layers' seconds
            are without.
    """

    layers: tuple[LayerProfile, ...]
    loss: LayerProfile | None
    skips: tuple[SkipProfile, ...]
    input_bytes: int
    target_bytes: int
    start_s: tuple[float, float] = (0.0, 0.0)


def profile_layers(
    module: nn.Sequential,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measure what each layer of a model costs, on one micro-batch.

    Runs in this process only, and blocks. Layers run one by one, as copies in training mode.

    Args:
        module: the model, not changed.
        sample: one micro-batch, not changed: what the model's one input is, a tensor
            ``(batch/m, …)`` or nested tuples, lists and dicts; or :class:`Inputs` of several.
        target: what the loss gets beside the output, if anything.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where there is no target; it
            is measured as a last layer.
        timeout: seconds after which no further round starts; three are always measured.
        device: where copies of the layers run, one at a time; by default the sample's.
        clock: gives the seconds since some moment.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (:class:`~procpipe.errors.BoundaryError`).
        ValueError: the model, the sample or ``device`` is meta, which computes nothing.
    """
    check_model(module)
    inputs = as_flat(sample)
    device = device_of(device, inputs.tensors)
    check_not_meta(module, inputs.tensors, device)
    whole = module
    if loss_fn is not None:
        target = map_tensors(lambda tensor: tensor.to(device), target)
        whole = nn.Sequential(OrderedDict(module._modules))
        whole.add_module(_LOSS, _Loss(loss_fn, target))
    counts = _Counts()
    run_each(whole, inputs, device, counts.count)
    start = _start_seconds(device, clock)
    seconds = _all_seconds(whole, inputs, device, timeout, clock)
    layers = [
        _profile(name, layer, sizes, seconds_of.beyond(start))
        for (name, layer), sizes, seconds_of in zip(
            whole._modules.items(), counts.layers, seconds, strict=True
        )
    ]
    return Profile(
        layers=tuple(layers[: len(module)]),
        loss=layers[-1] if loss_fn is not None else None,
        skips=counts.skips(),
        input_bytes=_num_bytes(inputs.tensors),
        target_bytes=_num_bytes(flatten(target)[0]),
        start_s=(start.forward_s, start.backward_s),
    )


class _Loss(nn.Module):
    """A loss function as a last layer."""

    def __init__(self, loss_fn: Callable[..., Tensor], target: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.target = target

    def forward(self, output: Any) -> Tensor:
        """Compute the loss."""
        given = () if self.target is None else (self.target,)
        return self.loss_fn(output, *given)


# -- seconds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seconds:
    forward_s: float
    backward_s: float
    input_gradient_s: float

    def beyond(self, start: _Seconds) -> _Seconds:
        """Take away what is spent before anything is done."""
        return _Seconds(
            max(0.0, self.forward_s - start.forward_s),
            max(0.0, self.backward_s - start.backward_s),
            max(0.0, self.input_gradient_s - start.input_gradient_s),
        )


def _start_seconds(device: torch.device, clock: Callable[[], float]) -> _Seconds:
    """Time a layer that does nothing: its backward starts autograd's engine all the same."""
    inputs = as_flat(torch.ones(1, requires_grad=True))
    module = nn.Sequential(*(nn.Identity() for _ in range(_NUM_STARTS)))
    layers = _all_seconds(module, inputs, device, 0.0, clock)
    return _Seconds(
        *(
            statistics.median(getattr(layer, name) for layer in layers)
            for name in ("forward_s", "backward_s", "input_gradient_s")
        )
    )


def _all_seconds(
    module: nn.Sequential,
    inputs: Flat,
    device: torch.device,
    timeout: float,
    clock: Callable[[], float],
) -> list[_Seconds]:
    """Time each layer in rounds, the first of which warms up; the median of each."""
    timer = Timer(device, clock)

    def time_both(layer: Layer) -> tuple[float, float]:
        for parameter in layer.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        forward_s = timer.seconds(layer.forward)
        gradients = layer.output_gradients()
        return forward_s, timer.seconds(lambda: layer.backward(gradients))

    def time_first_half(layer: Layer) -> float:
        entries = layer.entries()
        with noting_ends(layer.module) as ends:
            layer.forward()
        ends += entries
        gradients = layer.output_gradients()
        return timer.seconds(lambda: layer.gradients_up_to(ends, gradients))

    begun = clock()
    run_each(module, inputs, device, time_both)
    wholes: list[list[tuple[float, float]]] = []
    halves: list[list[float]] = []
    while len(wholes) < _MIN_ROUNDS or clock() - begun < timeout:
        wholes.append(run_each(module, inputs, device, time_both))
        halves.append(run_each(module, inputs, device, time_first_half))
    return [
        _Seconds(
            statistics.median(forward_s for forward_s, _ in whole),
            statistics.median(backward_s for _, backward_s in whole),
            statistics.median(half),
        )
        for whole, half in zip(zip(*wholes, strict=True), zip(*halves, strict=True), strict=True)
    ]


def _profile(name: str, layer: nn.Module, sizes: _Sizes, seconds: _Seconds) -> LayerProfile:
    half_s = min(seconds.input_gradient_s, seconds.backward_s)
    return LayerProfile(
        name,
        type(layer).__name__,
        seconds.forward_s,
        seconds.backward_s,
        half_s if sizes.put_off else seconds.backward_s,
        sizes.output,
        sizes.kept,
        sizes.kept_input,
        sizes.kept_output,
        sizes.put_off,
        sizes.is_in_place,
        _num_bytes(chain(layer.parameters(), layer.buffers())),
        _num_bytes(p for p in layer.parameters() if p.requires_grad),
    )


# -- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    output: int
    kept: int
    kept_input: int
    kept_output: int
    put_off: int
    is_in_place: bool


class _Counts:
    """Counts the bytes of each layer in one pass over all."""

    def __init__(self) -> None:
        self.layers: list[_Sizes] = []
        # The layer that stashes it, its bytes, bytes kept of it that are no in- or output's.
        self._skips: dict[Hashable, tuple[int, int, int]] = {}
        self._pops: dict[Hashable, list[tuple[int, int]]] = {}  # who pops it, bytes kept of it

    def count(self, layer: Layer) -> None:
        """Run a layer's forward, and count."""
        k = len(self.layers)
        stashes, pops = declared(layer.module)
        waiting = layer.waiting_skips()
        saved = Memories(())
        with (
            counting_put_off(layer.module) as put_off,
            torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor),
        ):
            layer.forward()
        for tensor in leaves(layer.outputs):
            saved.add(tensor)
        outputs, _ = flatten(layer.output)
        module = layer.module
        target = flatten(module.target)[0] if isinstance(module, _Loss) else []
        own = Memories(chain(module.parameters(), module.buffers(), target))
        entered, left, made = (Memories(of) for of in (layer.entering, outputs, layer.outputs))
        self.layers.append(
            _Sizes(
                output=_num_bytes(outputs),
                kept=saved.beyond(own | Memories(layer.inputs) | made).num_bytes(),
                kept_input=saved.num_bytes_within(entered),
                kept_output=saved.num_bytes_within(left),
                put_off=put_off.num_bytes(),
                is_in_place=entered.num_bytes_within(left) > 0,
            )
        )
        for key in pops:
            kept = saved.num_bytes_within(Memories(waiting.get(key, ())))
            self._pops.setdefault(key, []).append((k, kept))
        now = layer.waiting_skips()
        for key in stashes:
            stashed = Memories(now.get(key, ()))
            lonely = stashed.beyond(entered | left)
            self._skips[key] = k, _num_bytes(now.get(key, ())), lonely.num_bytes_within(saved)

    def skips(self) -> tuple[SkipProfile, ...]:
        """Return what was stashed and popped."""
        return tuple(
            SkipProfile(
                source,
                tuple(k for k, _ in self._pops[key]),
                num_bytes,
                max(kept, *(kept for _, kept in self._pops[key])),
            )
            for key, (source, num_bytes, kept) in self._skips.items()
            if key in self._pops
        )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
