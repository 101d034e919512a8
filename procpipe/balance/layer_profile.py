"""Measures each layer of a model for planning: seconds by task, bytes by where they are.

Which bytes a stage holds depends on where the model is cut:

    input ──> [ layer ]──> output           a boundary if the model is cut here, otherwise a value
                 │                          between two layers
                 └── kept inside: what autograd saves that is neither of them

The passes over all layers (``alone.py``) are separate, since hooks that count take time:

    1  once        bytes
    2  repeatedly  seconds of forward and backward, with existing gradients to add to
    3  repeatedly  seconds of the backward without the weights' gradients that can be deferred

Without running anything, one pass counts bytes and FLOPs of tensors that have no values.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from procpipe.balance.alone import LayerAlone, as_flat, run_each
from procpipe.balance.profile import Memories, check_model, checked, leaves, seconds_of
from procpipe.compute.sizes import num_bytes
from procpipe.compute.split.splitter import PutOff, Splitter, suited
from procpipe.skip.skippable import declared
from procpipe.torch_internals import FLOPS
from procpipe.tree import Flat, flatten, map_tensors

_MIN_ROUNDS = 3

#: How often the start of a task is timed.
_NUM_STARTS = 25

_LOSS = "(loss)"  # no layer of a user has brackets in its name


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs on one micro-batch."""

    name: str  # its name in the model
    type: str  # its class
    forward_s: float  # seconds of its forward
    backward_s: float  # seconds of its backward, which adds to existing gradients
    #: Seconds of it without the weights' gradients that can be deferred; all of it if none can.
    input_gradient_s: float
    output_bytes: int  # its output
    kept_bytes: int  # what autograd saves that is neither input nor output nor a skip tensor
    kept_input_bytes: int  # what autograd saves of its input
    kept_output_bytes: int  # what autograd saves of its output
    #: What is kept until deferred weights' gradients are computed: inputs of linear and convolution
    #: layers and of the projections of attentions, and gradients of their outputs.
    put_off_bytes: int
    is_in_place: bool  # whether its output is in the memory of its input
    parameter_bytes: int  # its parameters and buffers
    trained_bytes: int  # parameters that get a gradient


@dataclass(frozen=True)
class SkipProfile:
    """A skip tensor of one micro-batch."""

    source: int  # the index of the layer that stashes it
    destinations: tuple[int, ...]  # the indices of the layers that pop it
    tensor_bytes: int  # its size
    kept_bytes: int  # what autograd saves of it where it is popped


@dataclass(frozen=True)
class Profile:
    """What a model costs on one micro-batch."""

    layers: tuple[LayerProfile, ...]  # its layers
    loss: LayerProfile | None  # the loss function, as a last layer; None if none was given
    skips: tuple[SkipProfile, ...]  # its skip tensors
    input_bytes: int  # the micro-batch's input
    target_bytes: int  # its target
    #: Seconds of an empty forward and of an empty backward, which are subtracted from the layers'
    #: seconds.
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
    flops_per_s: float | None = None,
) -> Profile:
    """Measure what each layer of a model costs, on one micro-batch, or estimate it.

    Runs in this process only, and blocks. Layers run one by one, as copies in training mode.

    Args:
        module: the model, not changed.
        sample: one micro-batch, not changed: what the model's one input is, a tensor
            ``(batch/m, …)`` or nested tuples, lists and dicts; or :class:`Inputs` of several.
        target: the second argument of the loss, if it has one.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` without a target; measured as
            a last layer.
        timeout: seconds after which no further round starts; three are always measured.
        device: where copies of the layers run, one at a time; by default the sample's.
        clock: returns seconds, from any start.
        flops_per_s: for an estimate: nothing is computed, bytes are counted as on a CPU, and FLOPs
            make the seconds, a backward's twice those of the forward. The model, the sample and
            the target, a tensor, may be on any device, also meta; ``device`` is ignored.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (:class:`~procpipe.errors.BoundaryError`).
        ValueError: the model, the sample or ``device`` is meta, which computes nothing, and
            ``flops_per_s`` is not given.
    """
    if flops_per_s is None:
        inputs, found = checked(module, sample, device)
        target = map_tensors(lambda tensor: tensor.to(found), target)
    else:
        check_model(module)
        inputs = as_flat(sample, module)
    whole = module
    if loss_fn is not None:
        whole = nn.Sequential(OrderedDict(module._modules))
        whole.add_module(_LOSS, _Loss(loss_fn, target))
    counts = _Counts()
    if flops_per_s is not None:
        flops = run_each(whole, inputs, None, counts.count_flops)
        all_s = [(n / flops_per_s, 2 * n / flops_per_s, n / flops_per_s) for n in flops]
        start_s = 0.0, 0.0, 0.0
    else:
        run_each(whole, inputs, found, counts.count)
        start_s = _start_seconds(found, clock)
        all_s = _all_seconds(whole, inputs, found, timeout, clock)
    layers = []
    for (name, layer), sizes, seconds in zip(
        whole._modules.items(), counts.layers, all_s, strict=True
    ):
        forward_s, backward_s, first_s = (
            max(0.0, took_s - none_s) for took_s, none_s in zip(seconds, start_s, strict=True)
        )
        first_s = min(first_s, backward_s) if sizes["put_off_bytes"] else backward_s
        kind = type(layer).__name__
        layers.append(LayerProfile(name, kind, forward_s, backward_s, first_s, **sizes))
    return Profile(
        layers=tuple(layers[: len(module)]),
        loss=layers[-1] if loss_fn is not None else None,
        skips=counts.skips(),
        input_bytes=num_bytes(inputs.tensors),
        target_bytes=num_bytes(flatten(target)[0]),
        start_s=start_s[:2],
    )


class _Loss(nn.Module):
    """A loss function as a last layer."""

    def __init__(self, loss_fn: Callable[..., Any], target: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.target = target

    def forward(self, output: Any) -> Any:
        """Compute the loss."""
        given = () if self.target is None else (self.target,)
        return self.loss_fn(output, *given)


# -- seconds --------------------------------------------------------------------------------------


def _start_seconds(device: torch.device, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Time layers that do nothing: their backward starts autograd's engine all the same."""
    module = nn.Sequential(*(nn.Identity() for _ in range(_NUM_STARTS)))
    inputs = as_flat(torch.ones(1, requires_grad=True), module)
    return _medians(_all_seconds(module, inputs, device, 0.0, clock))


def _medians(times: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    forward_s, backward_s, first_s = map(statistics.median, zip(*times, strict=True))
    return forward_s, backward_s, first_s


def _all_seconds(
    module: nn.Sequential,
    inputs: Flat,
    device: torch.device,
    timeout: float,
    clock: Callable[[], float],
) -> list[tuple[float, float, float]]:
    """Return each layer's median seconds of forward, backward and the backward's first half."""

    def time_both(layer: LayerAlone, put_off: PutOff | None = None) -> tuple[float, float]:
        for parameter in layer.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        splitter = Splitter([layer.module], torch.empty(0, device=device, requires_grad=True))
        with splitter.into(put_off):
            forward_s = seconds_of(layer.forward, device, clock)
        gradients = layer.output_gradients()
        with splitter.into(put_off, is_backward=True):
            return forward_s, seconds_of(lambda: layer.backward(gradients), device, clock)

    def time_first_half(layer: LayerAlone) -> float:
        return time_both(layer, PutOff())[1]

    begun = clock()
    run_each(module, inputs, device, time_both)  # warms up
    rounds: list[list[tuple[float, float, float]]] = []
    while len(rounds) < _MIN_ROUNDS or clock() - begun < timeout:
        wholes = run_each(module, inputs, device, time_both)
        halves = run_each(module, inputs, device, time_first_half)
        rounds.append([(*whole, half) for whole, half in zip(wholes, halves, strict=True)])
    return [_medians(of_layer) for of_layer in zip(*rounds, strict=True)]


# -- bytes ----------------------------------------------------------------------------------------


class _Counts:
    """Counts the bytes of each layer in one pass over all."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = []  # the bytes of each LayerProfile
        # The layer that stashes it, its bytes, and what autograd saves of it elsewhere than in
        # that layer's input and output.
        self._skips: dict[Hashable, tuple[int, int, int]] = {}
        self._pops: dict[Hashable, list[tuple[int, int]]] = {}  # layer that pops it, bytes saved

    def count(self, layer: LayerAlone) -> None:
        """Run a layer's forward and count its bytes."""
        k = len(self.layers)
        stashes, pops = declared(layer.module)
        waiting = layer.cut.waiting()
        saved = Memories(())
        with (
            _counting_put_off(layer.module) as put_off,
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
            {
                "output_bytes": num_bytes(outputs),
                "kept_bytes": saved.beyond(own | Memories(layer.inputs) | made).num_bytes(),
                "kept_input_bytes": saved.num_bytes_within(entered),
                "kept_output_bytes": saved.num_bytes_within(left),
                "put_off_bytes": put_off.num_bytes(),
                "is_in_place": entered.num_bytes_within(left) > 0,
                "parameter_bytes": num_bytes(chain(module.parameters(), module.buffers())),
                "trained_bytes": num_bytes(p for p in module.parameters() if p.requires_grad),
            }
        )
        for key in pops:
            kept = saved.num_bytes_within(Memories(waiting.get(key, ())))
            self._pops.setdefault(key, []).append((k, kept))
        now = layer.cut.waiting()
        for key in stashes:
            stashed = Memories(now.get(key, ()))
            lonely = stashed.beyond(entered | left)
            self._skips[key] = k, num_bytes(now.get(key, ())), lonely.num_bytes_within(saved)

    def count_flops(self, layer: LayerAlone) -> int:
        """Run a layer's forward, count its bytes, and return its FLOPs."""
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
            self.count(layer)
        return int(counter.get_total_flops())

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


@contextmanager
def _counting_put_off(module: nn.Module) -> Iterator[Memories]:
    """Collect what the weights' gradients of a module will need, during a forward.

    That is the input and the gradient of the output, which is as large as the output. A stage
    splits backward with its own nodes in the graph (``procpipe.compute.split``), which tensors
    without values cannot go through; so here the stock layers run, with hooks.
    """
    found = Memories(())

    def note(layer: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        for tensor in (*given, *named.values()):
            found.add(tensor)
        found.add(torch.empty(output.shape, dtype=output.dtype, device="meta"))

    hooks = [
        layer.register_forward_hook(note, with_kwargs=True)
        for layer in suited([module])
        if layer.get_parameter("weight").requires_grad
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
