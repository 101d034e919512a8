"""Finds a balance: what each layer costs, divided evenly.

    by time     seconds of each layer's forward and backward, measured here
    by size     bytes that each layer holds, counted
    by shapes   parameters and estimated work: nothing is computed

Layers run as copies in training mode, one at a time (``alone.py``). A balance by name is found on
rank 0, as seconds differ from process to process, and every rank takes it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from procpipe.balance.alone import Inputs, LayerAlone, as_flat, run_each
from procpipe.balance.profile import (
    check_model,
    count_bytes,
    device_of,
    layer_seconds,
    where_to_time,
)
from procpipe.data.microbatch import scatter
from procpipe.errors import BalanceError
from procpipe.job.world import World
from procpipe.planner.divide import check_num_partitions, divide
from procpipe.run.coordinator import Agree
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
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (:class:`~procpipe.errors.BoundaryError`).
        BalanceError: ``partitions`` is less than 1, or more than there are layers.
        ValueError: the model, the sample or ``device`` is meta, which computes nothing.

    Source: torchgpipe 0.0.7, ``torchgpipe.balance.balance_by_time``.
    """
    check_model(module)
    check_num_partitions(partitions, len(module))
    inputs = as_flat(sample, module)
    where = where_to_time(module, inputs, device)
    seconds = layer_seconds(module, inputs, where, timeout, time.perf_counter)
    return divide([sum(of_layer.values()) for of_layer in seconds], partitions)


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

    Activations are those of one micro-batch between its forward and its backward: all that autograd
    saves, the output, and stashed skip tensors. Each memory counts once; the layer's input (which
    the previous layer counts as its output), parameters and buffers do not count as such.

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
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (:class:`~procpipe.errors.BoundaryError`).
        BalanceError: ``partitions`` is less than 1, or more than there are layers.
        ValueError: ``chunks`` is less than 1, or ``param_scale`` negative.

    Source: torchgpipe 0.0.7, ``torchgpipe.balance.balance_by_size``.
    """
    check_model(module)
    check_num_partitions(partitions, len(module))
    sizes = layer_sizes(module, input, chunks=chunks, param_scale=param_scale, device=device)
    return divide(sizes, partitions)


def layer_sizes(
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Count the bytes that each layer holds; arguments and errors are of ``balance_by_size``."""
    check_model(module)
    if chunks < 1 or not param_scale >= 0:
        raise ValueError(
            f"chunks is {chunks} and param_scale {param_scale}: give at least 1 chunk, and a scale "
            "from 0"
        )
    inputs = _first_micro_batch(as_flat(input, module), chunks)
    is_on_meta = any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
    where = torch.device("meta") if is_on_meta else device_of(device, inputs)
    of_parameters = [sum(p.nbytes for p in layer.parameters()) for layer in module]
    return [
        int(sizes["held_bytes"] + int(param_scale * num_bytes))
        for sizes, num_bytes in zip(count_bytes(module, inputs, where), of_parameters, strict=True)
    ]


def _first_micro_batch(inputs: Flat, chunks: int) -> Flat:
    """Return the first part that ``torch.chunk`` makes, which is the largest."""
    num_samples = next((len(tensor) for tensor in inputs.tensors if tensor.dim()), 0)
    num_rows = -(-num_samples // chunks)
    tensors = [
        tensor[:num_rows] if tensor.dim() and len(tensor) == num_samples else tensor
        for tensor in inputs.tensors
    ]
    return Flat(tensors, inputs.structure, inputs.requires_grad)


# -- on every rank of a job -----------------------------------------------------------------------


def agreed_balance(
    kind: str,
    module: nn.Sequential,
    sample: Any,
    chunks: int,
    world: World,
    agree: Agree,
    num_partitions: int,
) -> list[int]:
    """Find a balance on rank 0; every rank calls it, and the others wait.

    Args:
        kind: "time" or "size".
        module: the full model.
        sample: on rank 0, a mini-batch of the size that training will have: the model's input,
            ``balance.Inputs`` of several, or a dict of its named ones.
        chunks: micro-batches in a mini-batch.
        world: this process's place in the job.
        agree: joins rank 0 and the others.
        num_partitions: the number of partitions.

    Raises:
        BalanceError: another kind, no sample on rank 0, or fewer layers than partitions.
    """
    if kind not in ("time", "size"):
        raise BalanceError(
            f"balance is {kind!r}: give the number of layers in each stage, or 'time' or 'size' to "
            "have it found from a sample"
        )
    if not world.is_launched:
        return [len(module)]

    def combine(asked: list[Any]) -> list[int]:
        for rank, theirs in zip(world.grid.numbers, asked, strict=False):
            if theirs != "balance":  # it is given there: these are its facts, see compare_facts
                raise BalanceError(
                    f"rank {world.grid.numbers[0]} has arguments by which it finds the balance, "
                    f"but rank {rank} has not: give every rank the same arguments"
                )
        if sample is None:
            raise BalanceError(
                f"balance={kind!r} needs a sample on rank 0: Stage(model, balance={kind!r}, "
                "sample=x), where x is an input as for training"
            )
        inputs = Inputs.of(sample, module)
        values, named = scatter((inputs.values, inputs.named), chunks)[0][0]
        find = balance_by_time if kind == "time" else balance_by_size
        return find(num_partitions, module, Inputs(*values, **named), device=world.device)

    found: list[int] = agree("balance", combine)
    return found


# -- by shapes ------------------------------------------------------------------------------------

#: What a parameter costs, in FLOPs of one sample's forward. Per training step it costs as much as
#: some 1000 FLOPs: its gradient and the optimizer's state are read and written, about 40 bytes.
#: Those FLOPs are 3 (forward and backward) times 32 samples times 10.
_FLOPS_PER_PARAMETER = 10

#: Batch normalisation needs two samples.
_NUM_SAMPLES = 2
_LENGTH = 128
_IMAGE_SIZES = (64, 224, 32, 28, 16, 8)  # some models flatten images of one size


def estimated_balance(
    num_partitions: int, module: nn.Sequential, sample: Any = None
) -> tuple[list[int], str]:
    """Balance a model by its parameters and its estimated work, the FLOPs of one sample's forward.

    Runs in this process only. Layers run on the meta device, so nothing is computed, and nothing is
    copied but shapes: every rank finds the same for itself, for a model of any size. The layers'
    hooks run too. Where the layers cannot run on an input, the parameters alone decide.

    Args:
        num_partitions: from 1 to the number of layers.
        module: the model, on any device, not changed; its random number generators are not either.
        sample: an input as for training, as for ``balance_by_time``; by default the attribute
            ``sample`` of the model, where a tuple has several inputs and a dict named ones; else a
            guess from the first layer with a weight.

    Returns:
        The number of layers in each partition, and what it was found from, as a sentence.

    Raises:
        BalanceError: ``num_partitions`` is less than 1, or more than there are layers.
    """
    check_num_partitions(num_partitions, len(module))
    counts = [sum(p.numel() for p in layer.parameters()) for layer in module]
    costs = [count + 1.0 for count in counts]  # layers without parameters are divided, too
    found, fault = _first_that_runs(module, sample)
    if found is None:
        basis = f"by parameters alone, as {fault}"
    else:
        flops, shapes = found
        costs = [
            cost * _FLOPS_PER_PARAMETER + per_sample
            for cost, per_sample in zip(costs, flops, strict=True)
        ]
        basis = f"by parameters and estimated work (FLOPs of an input {shapes})"
    balance = divide(costs, num_partitions)
    left = iter(costs)
    largest = max(sum(islice(left, num_layers)) for num_layers in balance)
    share = f"the largest partition has {largest / sum(costs):.0%} of the total"
    return balance, f"balance {balance}, {basis}: {share}"


def _first_that_runs(
    module: nn.Sequential, sample: Any
) -> tuple[tuple[list[float], str] | None, str]:
    """Return each layer's FLOPs a sample, and the input's shapes; or None, and why."""
    fault = "no input is known (give sample=x, an input as for training)"
    for inputs in _candidates(module, sample):
        try:
            flat = as_flat(inputs, module)
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in flat.tensors)
            with warnings.catch_warnings(), _without_compiling():
                warnings.simplefilter("ignore")
                flops = run_each(module, flat, torch.device("meta"), _flops)
        except Exception as error:  # of any kind, since it is the user's code that runs
            said = str(error).strip().partition("\n")[0][:200]
            where = next(iter(getattr(error, "__notes__", ())), "before the first layer")
            kind = type(error).__name__
            fault = f"the model cannot run on the meta device ({kind} {where}: {said})"
            if sample is None and "sample" not in vars(module):
                fault += "; the input was a guess: give sample=x, an input as for training"
            continue
        num_samples = next((len(tensor) for tensor in flat.tensors if tensor.dim()), 1) or 1
        return ([flop / num_samples for flop in flops], shapes), ""
    return None, fault


def _flops(layer: LayerAlone) -> int:
    with FlopCounterMode(display=False) as counter:
        layer.forward()
    return int(counter.get_total_flops())


def _candidates(module: nn.Sequential, sample: Any) -> Iterator[Any]:
    """Yield the input that is given, or those that are guessed."""
    if sample is None:
        sample = vars(module).get("sample")  # a layer of that name is not among these
        if isinstance(sample, tuple):
            sample = Inputs(*sample)
    if sample is not None:
        yield sample
        return
    first = next((layer for layer in module if any(True for _ in layer.parameters())), module)
    for each in first.modules():
        if guesses := list(_guesses(each)):
            yield from guesses
            return


def _guesses(module: nn.Module) -> Iterator[Tensor]:
    """Yield inputs that a module takes, if its class shows any."""
    dtype = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    shapes: list[tuple[int, ...]] = []
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        shapes, dtype = [(_LENGTH,)], torch.long
    elif isinstance(module, nn.RNNBase):
        shapes = [(_LENGTH, module.input_size)]
    elif isinstance(module, nn.Conv1d):
        shapes = [(module.in_channels, _LENGTH)]
    elif isinstance(module, nn.Conv2d):
        shapes = [(module.in_channels, size, size) for size in _IMAGE_SIZES]
    elif isinstance(module, nn.Conv3d):
        shapes = [(module.in_channels, 16, 64, 64)]
    elif isinstance(module, nn.Linear):
        shapes = [(module.in_features,)]
    for shape in shapes:
        yield torch.empty(_NUM_SAMPLES, *shape, dtype=dtype, device="meta")


def _without_compiling() -> AbstractContextManager[object]:
    """Let layers that hold compiled code run as they were written."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
