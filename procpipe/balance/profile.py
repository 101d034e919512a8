"""Fills the table of layers: seconds by task, bytes by where they are.

Which bytes a stage holds depends on where the model is cut:

    input ──> [ layer ]──> output           a boundary if the model is cut here, otherwise a value
                 │                          between two layers
                 └── kept inside: what autograd saves that is neither of them

The passes over all layers (``alone.py``) are separate, since hooks that count take time:

    1  once        bytes
    2  repeatedly  seconds of forward and backward, with existing gradients to add to

A backward in two tasks is taken to be in halves, unless nothing of it can be put off.

Without running anything, one pass counts bytes and FLOPs of tensors that have no values. Bytes are
counted, not taken from an allocator, so they are the same on every device.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from procpipe.balance.alike import likeness
from procpipe.balance.alone import LayerAlone, as_flat, num_samples, run_each
from procpipe.compute.split import suited
from procpipe.data.loss import Loss
from procpipe.model.cut import check_model
from procpipe.model.ties import find_ties
from procpipe.planner.costs import Layer, Skip, Table, Tie, task_seconds
from procpipe.skip.skippable import declared
from procpipe.torch_internals import FLOPS
from procpipe.tree import Flat, flatten, map_tensors

#: How often the start of a task is timed.
_NUM_STARTS = 25

_LOSS = "(loss)"  # no layer of a user has brackets in its name

Clock = Callable[[], float]

#: Of one layer, by kind of task.
Seconds = dict[str, float]


def profile_layers(
    module: nn.Sequential,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
    flops_per_s: float | None = None,
) -> Table:
    """Measure what each layer of a model costs, on one micro-batch, or estimate it.

    Runs in this process only, and blocks. Layers run one by one, as copies in training mode.

    Args:
        module: the model, not changed.
        sample: one micro-batch, not changed: what the model's one input is, a tensor
            ``(batch/m, …)`` or nested tuples, lists and dicts; or ``Inputs`` of several.
        target: the second argument of the loss, if it has one.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` without a target; measured as
            a last layer.
        timeout: seconds after which no further round starts; one is always measured.
        device: where copies of the layers run, one at a time; by default the sample's.
        flops_per_s: for an estimate: nothing is computed, bytes are counted as on a CPU, and FLOPs
            make the seconds, a backward's twice those of the forward. The model, the sample and
            the target, a tensor, may be on any device, also meta; ``device`` is ignored.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (``procpipe.errors.BoundaryError``).
        ValueError: the model holds a layer twice; it, the sample or ``device`` is meta, which
            computes nothing, and ``flops_per_s`` is not given; or the loss is no 0-dim tensor.
    """
    check_model(module)
    inputs = as_flat(sample, module)
    where = None
    if flops_per_s is None:
        where = device_of(device, inputs)
        tensors = chain(module.parameters(), module.buffers(), inputs.tensors)
        if where.type == "meta" or any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                "on the meta device nothing is computed, so no time can be measured: build model "
                "and sample on a real device, or balance by size, which works on meta"
            )
        target = map_tensors(lambda tensor: tensor.to(where), target)
    whole = module
    if loss_fn is not None:
        whole = nn.Sequential(OrderedDict(module._modules))
        whole.add_module(_LOSS, _Loss(loss_fn, target))
    counts = Counts()
    if where is None:
        assert flops_per_s is not None
        counted = run_each(whole, inputs, None, counts.count_flops, likeness)
        all_sizes = [sizes for sizes, _ in counted]
        seconds = [{"F": n / flops_per_s, "B": 2 * n / flops_per_s} for _, n in counted]
    else:
        all_sizes = run_each(whole, inputs, where, counts.count)
        seconds = layer_seconds(whole, inputs, where, timeout)
    layers = []
    for name, sizes, of_layer in zip(whole._modules, all_sizes, seconds, strict=True):
        first_s = None if sizes["put_off_bytes"] else of_layer["B"]
        of_tasks = task_seconds(of_layer["F"], of_layer["B"], input_gradient_s=first_s)
        layers.append(Layer(name, of_tasks, **sizes))
    return Table(
        samples=num_samples(inputs),
        layers=tuple(layers[: len(module)]),
        loss=layers[-1] if loss_fn is not None else None,
        skips=counts.skips(),
        ties=_ties_of(module),
        input_bytes=_num_bytes(inputs.tensors),
        target_bytes=_num_bytes(flatten(target)[0]),
    )


def device_of(device: torch.device | str | None, inputs: Flat) -> torch.device:
    """Return the device to profile on: by default that of the sample's tensors."""
    if device is not None:
        return torch.device(device)
    return inputs.tensors[0].device if inputs.tensors else torch.device("cpu")


def _ties_of(model: nn.Sequential) -> tuple[Tie, ...]:
    """List the parameters and buffers that several layers use."""
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    ties = find_ties([{name: layer} for name, layer in model.named_children()])
    found = [(tie.partitions, tensors[tie.all_names[0]]) for tie in ties]
    return tuple(Tie(users, one.nbytes, one.nbytes * one.requires_grad) for users, one in found)


class _Loss(nn.Module):
    """A loss function as a last layer, called and checked as by a stage."""

    def __init__(self, loss_fn: Callable[..., Any], target: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.target = target

    def forward(self, output: Any) -> Any:
        """Compute the loss."""
        return Loss(self.loss_fn, lambda target: 1).of(output, self.target)


# -- seconds --------------------------------------------------------------------------------------


def layer_seconds(
    module: nn.Sequential,
    inputs: Flat,
    device: torch.device,
    timeout: float,
    clock: Clock = time.perf_counter,
) -> list[Seconds]:
    """Return each layer's median seconds by kind of task, without those of starting a task.

    All layers run once to warm up, then repeatedly on the same inputs; after ``timeout`` no further
    round starts.
    """
    measure = partial(_timed, device=device, clock=clock)
    # Layers that do nothing: their backward starts autograd's engine all the same.
    empty = nn.Sequential(*(nn.Identity() for _ in range(_NUM_STARTS)))
    starts = run_each(empty, as_flat(torch.ones(1, requires_grad=True), empty), device, measure)
    start_s = {kind: statistics.median(each[kind] for each in starts) for kind in "FB"}
    begun = clock()
    run_each(module, inputs, device, measure)
    rounds = [run_each(module, inputs, device, measure)]
    while clock() - begun < timeout:
        rounds.append(run_each(module, inputs, device, measure))
    return [
        {
            kind: max(0.0, statistics.median(each[kind] for each in of_layer) - start_s[kind])
            for kind in "FB"
        }
        for of_layer in zip(*rounds, strict=True)
    ]


def seconds_of(run: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return the seconds of a function, until a device that may run behind has finished."""

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    begun_s = now_s()
    run()
    return now_s() - begun_s


def _timed(layer: LayerAlone, device: torch.device, clock: Clock) -> Seconds:
    """Run a layer forward and backward, with existing gradients to add to."""
    for parameter in layer.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    forward_s = seconds_of(layer.forward, device, clock)
    if not (roots := layer.roots()):
        return {"F": forward_s, "B": 0.0}
    gradients = [torch.ones_like(root) for root in roots]
    backward_s = seconds_of(lambda: torch.autograd.backward(roots, gradients), device, clock)
    return {"F": forward_s, "B": backward_s}


# -- bytes ----------------------------------------------------------------------------------------


#: The memories of tensors, each once however many tensors share it; alive, since freed memory
#: would be reused.
_Memories = dict[int, torch.UntypedStorage]


def _memories(tensors: Iterable[Tensor]) -> _Memories:
    """Return the memories of tensors; sparse ones, which have several, are ignored."""
    storages = (one.untyped_storage() for one in tensors if one.layout == torch.strided)
    return {id(storage): storage for storage in storages}  # one object for all tensors in it


def _added(memories: _Memories, keys: Iterable[int]) -> int:
    """Add up the bytes of some memories."""
    return sum(memories[key].nbytes() for key in keys)


class Counts:
    """Counts the bytes of each layer in one pass over all."""

    def __init__(self) -> None:
        # The layer that stashes it, its bytes, and what autograd saves of it elsewhere than in
        # that layer's input and output.
        self._skips: dict[Hashable, tuple[int, int, int]] = {}
        self._pops: dict[Hashable, list[tuple[int, int]]] = {}  # layer that pops it, bytes saved

    def count(self, layer: LayerAlone) -> dict[str, Any]:
        """Run a layer's forward, and return its bytes, by their names in ``Layer``."""
        k, module = layer.index, layer.module
        stashes, pops = declared(module)
        waiting = layer.cut.waiting()
        saved: _Memories = {}

        def save(tensor: Tensor) -> Tensor:
            saved.update(_memories([tensor]))
            return tensor

        with (
            _counting_put_off(module) as put_off,
            torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        ):
            layer.forward()
        saved |= _memories(_leaves(layer.outputs))
        outputs, _ = flatten(layer.output)
        target = flatten(module.target)[0] if isinstance(module, _Loss) else []
        own = _memories(chain(module.parameters(), module.buffers(), target))
        entered, left, made = map(_memories, (layer.inputs, outputs, layer.outputs))
        before = own | entered | _memories(chain.from_iterable(waiting.values()))
        for key in pops:
            kept = _added(saved, saved.keys() & _memories(waiting.get(key, ())))
            self._pops.setdefault(key, []).append((k, kept))
        now = layer.cut.waiting()
        for key, _ in stashes:
            lonely = (saved.keys() & _memories(now.get(key, ()))) - entered.keys() - left.keys()
            self._skips[key] = k, _num_bytes(now.get(key, ())), _added(saved, lonely)
        return {
            "output_bytes": _num_bytes(outputs),
            "held_bytes": _added(saved | made, (saved | made).keys() - before.keys()),
            "kept_bytes": _added(saved, saved.keys() - before.keys() - made.keys()),
            "kept_input_bytes": _added(saved, saved.keys() & entered),
            "kept_output_bytes": _added(saved, saved.keys() & left),
            "put_off_bytes": _added(put_off, put_off),
            "is_in_place": _added(entered, entered.keys() & left) > 0,
            "parameter_bytes": _num_bytes(chain(module.parameters(), module.buffers())),
            "trained_bytes": _num_bytes(p for p in module.parameters() if p.requires_grad),
        }

    def count_flops(self, layer: LayerAlone) -> tuple[dict[str, Any], int]:
        """Run a layer's forward, and return its bytes and its FLOPs."""
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
            found = self.count(layer)
        return found, int(counter.get_total_flops())

    def skips(self) -> tuple[Skip, ...]:
        """Return what was stashed and popped."""
        return tuple(
            Skip(
                source,
                tuple(k for k, _ in self._pops[key]),
                num_bytes,
                max(kept, *(kept for _, kept in self._pops[key])),
            )
            for key, (source, num_bytes, kept) in self._skips.items()
            if key in self._pops
        )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)  # sparse: no nbytes


def _leaves(outputs: list[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of the outputs' graph, which keeps them alive without saving them."""
    nodes = [output.grad_fn for output in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(child for child, _ in node.next_functions)
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf


@contextmanager
def _counting_put_off(module: nn.Module) -> Iterator[_Memories]:
    """Collect what the weights' gradients of a module will need, during a forward.

    That is the input and the gradient of the output, which is as large as the output. A stage
    splits backward with its own nodes in the graph (``procpipe.compute.split``), which tensors
    without values cannot go through; so here the stock layers run, with hooks.
    """
    found: _Memories = {}

    def note(layer: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        gradient = torch.empty(output.shape, dtype=output.dtype, device="meta")
        found.update(_memories([*given, *named.values(), gradient]))

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
