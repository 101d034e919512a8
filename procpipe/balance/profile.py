"""Finds a balance: measures the seconds or counts the bytes of each layer, and divides them evenly.

Layers run as copies in training mode, one at a time (``alone.py``). Bytes are counted, not taken
from an allocator, so they are the same on every device; on meta nothing is computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.balance.alone import LayerAlone, as_flat, run_each
from procpipe.balance.blocks import blocks, check_num_partitions
from procpipe.tree import Flat


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Balance a model by the seconds of its layers' forward and backward.

    Runs in this process only, and blocks. Seconds differ from process to process, so ranks that
    each call it may get different balances, which is an error in their first call of the stage. In
    a script that every rank runs, use ``Stage(model, balance="time", sample=x)``: rank 0 measures.

    Args:
        partitions: their number, from 1 to the number of layers.
        module: the model, not changed: copies of its layers are profiled, in training mode. The
            random number generators are not changed either.
        sample: one micro-batch, not changed: what the model's one input is, a tensor
            ``(batch/m, …)`` or nested tuples, lists and dicts; or
            :class:`~procpipe.balance.Inputs` of several. It should have the size used in training.
        timeout: seconds to spend; each layer is measured at least once.
        device: where copies of the layers run, one at a time; by default the sample's.

    Returns:
        The number of layers in each partition: no other balance has a smaller largest sum of
        seconds, and of those with the same none is more even.

    Raises:
        TypeError: the model is not an ``nn.Sequential``.
        BalanceError: ``partitions`` is less than 1, or more than there are layers.
        ValueError: the model, the sample or ``device`` is meta, which computes nothing.

    Source: torchgpipe 0.0.7, ``torchgpipe.balance.balance_by_time``.
    """
    check_model(module)
    check_num_partitions(partitions, len(module))
    costs = layer_times(module, sample, timeout=timeout, device=device)
    return blocks(costs, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Balance a model by the bytes its layers hold: activations and parameters.

    Runs in this process only, and blocks. Bytes are counted, so every process finds the same, and
    a model on the meta device needs no memory.

    Args:
        partitions: their number, from 1 to the number of layers.
        module: the model, not changed: copies of its layers are profiled, in training mode. The
            random number generators are not changed either.
        input: a mini-batch, not changed: what the model's one input is, a tensor ``(batch, …)`` or
            nested tuples, lists and dicts; or :class:`~procpipe.balance.Inputs` of several.
            Tensors with as many samples as the first are scattered, others are not.
        chunks: micro-batches in a mini-batch; the activations of the first count, which is the
            largest, as the others are recomputed.
        param_scale: bytes held for each byte of parameters: 2 for plain SGD (parameters and
            gradients), 3 with momentum, 4 for Adam. One that layers share counts in each of them.
        device: where copies of the layers run, one at a time; by default the input's. A model with
            parameters on the meta device is always measured there.

    Returns:
        The number of layers in each partition: no other balance has a smaller largest sum of
        bytes, and of those with the same none is more even.

    Raises:
        TypeError: the model is not an ``nn.Sequential``.
        BalanceError: ``partitions`` is less than 1, or more than there are layers.
        ValueError: ``chunks`` is less than 1, or ``param_scale`` negative.

    Source: torchgpipe 0.0.7, ``torchgpipe.balance.balance_by_size``.
    """
    check_model(module)
    check_num_partitions(partitions, len(module))
    costs = layer_sizes(module, input, chunks=chunks, param_scale=param_scale, device=device)
    return blocks(costs, partitions)


def layer_times(
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Measure the forward and backward of each layer.

    All layers run once to warm up, then repeatedly on the same sample. Runs in this process only,
    and blocks.

    The arguments are those of :func:`balance_by_time`, and ``clock`` returns seconds from any
    start. After ``timeout`` no further round starts.

    Returns:
        Seconds a layer, the median of all rounds.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (:class:`~procpipe.errors.BoundaryError`).
        ValueError: the model, the sample or ``device`` is meta, which computes nothing.
    """
    inputs, where = checked(module, sample, device)

    def time_layer(layer: LayerAlone) -> float:
        forward_s = seconds_of(layer.forward, where, clock)
        gradients = layer.output_gradients()
        return forward_s + seconds_of(lambda: layer.backward(gradients), where, clock)

    begun = clock()
    run_each(module, inputs, where, time_layer)
    rounds = [run_each(module, inputs, where, time_layer)]
    while clock() - begun < timeout:
        rounds.append(run_each(module, inputs, where, time_layer))
    return [statistics.median(of_layer) for of_layer in zip(*rounds, strict=True)]


def layer_sizes(
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Count the bytes that each layer holds in training.

    These are the activations of one micro-batch between its forward and its backward, and the
    parameters with their optimizer states. Activations are all that autograd saves, the output, and
    stashed skip tensors. Each memory counts once; the layer's input (which the previous layer
    counts as its output), parameters and buffers do not count.

    The arguments are those of :func:`balance_by_size`.

    Returns:
        Bytes a layer.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (:class:`~procpipe.errors.BoundaryError`).
        ValueError: ``chunks`` is less than 1, or ``param_scale`` negative.
    """
    check_model(module)
    if chunks < 1 or not param_scale >= 0:
        raise ValueError(
            f"chunks is {chunks} and param_scale {param_scale}: give at least 1 chunk, and a scale "
            "from 0"
        )
    inputs = _first_micro_batch(as_flat(input, module), chunks)
    device = torch.device("meta") if _on_meta(module) else _device_of(device, inputs.tensors)

    def size(layer: LayerAlone) -> int:
        of_parameters = sum(parameter.nbytes for parameter in layer.module.parameters())
        return _num_activation_bytes(layer) + int(param_scale * of_parameters)

    return run_each(module, inputs, device, size)


def checked(
    module: nn.Sequential, sample: Any, device: torch.device | str | None
) -> tuple[Flat, torch.device]:
    """Check what is to be timed; return the model's inputs, and the device to run on."""
    check_model(module)
    inputs = as_flat(sample, module)
    found = _device_of(device, inputs.tensors)
    on_meta = {
        "the model": _on_meta(module),
        "the sample": any(tensor.is_meta for tensor in inputs.tensors),
        "the device to profile on": found.type == "meta",
    }
    if any(on_meta.values()):
        what = " and ".join(name for name, is_meta in on_meta.items() if is_meta)
        raise ValueError(
            f"{what}: on the meta device nothing is computed, so no time can be measured: build "
            "model and sample on a real device, or balance by size, which works on meta"
        )
    return inputs, found


def check_model(module: nn.Module) -> None:
    """Raise TypeError unless the model is an ``nn.Sequential``."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"the model is a {type(module).__qualname__}: pass an nn.Sequential, whose layers can "
            "be profiled one by one"
        )


def seconds_of(run: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds of a function, until a device that may run behind has finished."""

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    begun_s = now_s()
    run()
    return now_s() - begun_s


class Memories:
    """The memories of tensors, each once however many tensors share it.

    Keeps them alive, since freed memory would be reused.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> Tensor:
        """Add a tensor's memory (sparse tensors, which have several, are ignored)."""
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._storages[id(storage)] = storage  # one object for all tensors in it
        return tensor

    def __or__(self, others: Memories) -> Memories:
        both = Memories(())
        both._storages = self._storages | others._storages
        return both

    def beyond(self, others: Memories) -> Memories:
        """Return those that are not in the others."""
        left = Memories(())
        left._storages = {k: v for k, v in self._storages.items() if k not in others._storages}
        return left

    def num_bytes_within(self, others: Memories) -> int:
        """Return the bytes of those that are in the others."""
        return self.num_bytes() - self.beyond(others).num_bytes()

    def num_bytes(self) -> int:
        """Return the bytes of all."""
        return sum(storage.nbytes() for storage in self._storages.values())


def _num_activation_bytes(layer: LayerAlone) -> int:
    before = Memories(chain(layer.inputs, layer.module.parameters(), layer.module.buffers()))
    held = Memories(())
    with torch.autograd.graph.saved_tensors_hooks(held.add, lambda tensor: tensor):
        layer.forward()
    for tensor in chain(layer.outputs, leaves(layer.outputs)):
        held.add(tensor)
    return held.beyond(before).num_bytes()


def leaves(outputs: list[Tensor]) -> Iterator[Tensor]:
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


def _first_micro_batch(inputs: Flat, chunks: int) -> Flat:
    """Return the first part that ``torch.chunk`` makes, which is the largest."""
    num_samples = next((len(tensor) for tensor in inputs.tensors if tensor.dim()), 0)
    num_rows = -(-num_samples // chunks)
    tensors = [
        tensor[:num_rows] if tensor.dim() and len(tensor) == num_samples else tensor
        for tensor in inputs.tensors
    ]
    return Flat(tensors, inputs.structure, inputs.requires_grad)


def _device_of(device: torch.device | str | None, tensors: list[Tensor]) -> torch.device:
    """Return the device to profile on: by default that of the sample's tensors."""
    if device is not None:
        return torch.device(device)
    return tensors[0].device if tensors else torch.device("cpu")


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
