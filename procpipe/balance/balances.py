"""Finds a balance: what each layer costs, divided evenly.

    by time     seconds of each layer's forward and backward, measured here
    by size     bytes that each layer holds, counted
    by shapes   parameters and estimated work: nothing is computed

Layers run as copies in training mode, one at a time (``alone.py``). A balance by name is found on
rank 0, as seconds differ from process to process, and every rank takes it.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from procpipe.balance.alone import Inputs, as_flat, num_samples, run_each
from procpipe.balance.profile import Counts, device_of, profile_layers
from procpipe.data.microbatch import scatter
from procpipe.errors import BalanceError
from procpipe.job.world import World
from procpipe.model.cut import check_model
from procpipe.notes import progress, write_note
from procpipe.planner.divide import check_num_partitions, divide
from procpipe.run.coordinator import Agree
from procpipe.tree import unflatten


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
            ``procpipe.balance.Inputs`` of several. It should have the size used in training.
        timeout: seconds to spend; each layer is measured at least once.
        device: where copies of the layers run, one at a time; by default the sample's.

    Returns:
        The number of layers in each partition: no other balance has a smaller largest sum of
        seconds, and of those with the same none is more even.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or a layer returns what cannot leave a
            stage (``procpipe.errors.BoundaryError``).
        BalanceError: ``partitions`` is less than 1, or more than there are layers.
        ValueError: the model holds a layer twice; or it, the sample or ``device`` is meta, which
            computes nothing.

    Source: torchgpipe 0.0.7, ``torchgpipe.balance.balance_by_time``.
    """
    check_model(module)
    check_num_partitions(partitions, len(module))
    table = profile_layers(module, sample, timeout=timeout, device=device)
    return divide(table.layer_seconds(), partitions)


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
        module: the model, not changed, as in ``balance_by_time``.
        input: a mini-batch ``(batch, …)``, not changed, otherwise as the sample there; it is
            scattered as by ``Stage``.
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
        TypeError: as in ``balance_by_time``; or the input has no tensor to scatter.
        BalanceError: ``partitions`` is less than 1, or more than there are layers.
        ValueError: ``chunks`` is less than 1, or ``param_scale`` negative; or tensors of the input
            have different numbers of samples.

    Source: torchgpipe 0.0.7, ``torchgpipe.balance.balance_by_size``.
    """
    check_model(module)
    check_num_partitions(partitions, len(module))
    if chunks < 1 or not param_scale >= 0:
        raise ValueError(
            f"chunks is {chunks} and param_scale {param_scale}: give at least 1 chunk, and a scale "
            "from 0"
        )
    inputs = as_flat(_first_micro_batch(input, module, chunks), module)
    is_on_meta = any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
    where = torch.device("meta") if is_on_meta else device_of(device, inputs)
    of_parameters = [sum(p.nbytes for p in layer.parameters()) for layer in module]
    counted = run_each(module, inputs, where, Counts().count)
    sizes = [
        of_layer["held_bytes"] + int(param_scale * num_bytes)
        for of_layer, num_bytes in zip(counted, of_parameters, strict=True)
    ]
    return divide(sizes, partitions)


def _first_micro_batch(sample: Any, module: nn.Sequential, chunks: int) -> Inputs:
    """Return the first of the micro-batches that a stage would make, which is the largest."""
    inputs = Inputs.of(sample, module)
    (first, *_), structure, _ = scatter((inputs.values, inputs.named), chunks)
    values, named = unflatten(first, structure)
    return Inputs(*values, **named)


# -- on every rank of a job -----------------------------------------------------------------------


def found_balance(
    kind: str | None,
    module: nn.Sequential,
    sample: Any,
    chunks: int,
    world: World,
    agree: Agree,
    num_partitions: int,
) -> list[int]:
    """Find a balance on rank 0; every rank calls it, and the others wait.

    Without a kind each rank finds the same from the model's shapes, and rank 0 prints it.

    Args:
        kind: "time" or "size"; None to estimate.
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
    if kind is None:
        balance, basis = estimated_balance(num_partitions, module, sample)
        if world.rank == 0:
            write_note(f"procpipe: {basis}")
        return balance
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
        with progress(f"balance={kind!r}"):
            if kind == "size":
                return balance_by_size(
                    num_partitions, module, sample, chunks=chunks, device=world.device
                )
            micro_batch = _first_micro_batch(sample, module, chunks)
            return balance_by_time(num_partitions, module, micro_batch, device=world.device)

    found: list[int] = agree("balance", combine)
    return found


# -- by shapes ------------------------------------------------------------------------------------

#: What a parameter costs, in FLOPs of one sample's forward. Per training step it costs as much as
#: some 1000 FLOPs: its gradient and the optimizer's state are read and written, about 40 bytes.
#: Those FLOPs are 3 (forward and backward) times 32 samples times 10.
_FLOPS_PER_PARAMETER = 10


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
            ``sample`` of the model, where a tuple has several inputs and a dict named ones.

    Returns:
        The number of layers in each partition, and what it was found from, as a sentence.

    Raises:
        BalanceError: ``num_partitions`` is less than 1, or more than there are layers.
    """
    check_num_partitions(num_partitions, len(module))
    if sample is None:
        sample = vars(module).get("sample")  # a layer of that name is not among these
        if isinstance(sample, tuple):
            sample = Inputs(*sample)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in module]
    costs = [count + 1.0 for count in counts]  # layers without parameters are divided, too
    flops, words = _work(module, sample)
    if flops:
        costs = [
            cost * _FLOPS_PER_PARAMETER + per_sample
            for cost, per_sample in zip(costs, flops, strict=True)
        ]
    balance = divide(costs, num_partitions)
    left = iter(costs)
    largest = max(sum(islice(left, num_layers)) for num_layers in balance)
    share = f"the largest partition has {largest / sum(costs):.0%} of the total"
    return balance, f"balance {balance}, by parameters {words}: {share}"


def _work(module: nn.Sequential, sample: Any) -> tuple[list[float], str]:
    """Return each layer's FLOPs a sample, and of which input; or none, and why."""
    if sample is None:
        return [], "alone, as no input is known (give sample=x, an input as for training)"
    try:
        inputs = as_flat(sample, module)
        with warnings.catch_warnings(), _without_compiling():
            warnings.simplefilter("ignore")
            counted = run_each(module, inputs, torch.device("meta"), Counts().count_flops)
    except Exception as error:  # of any kind, since it is the user's code that runs
        said = str(error).strip().partition("\n")[0][:200]
        where = next(iter(getattr(error, "__notes__", ())), "before the first layer")
        reason = f"{type(error).__name__} {where}: {said}"
        return [], f"alone, as the model cannot run on the meta device ({reason})"
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in inputs.tensors)
    per_sample = [num_flops / num_samples(inputs) for _, num_flops in counted]
    return per_sample, f"and estimated work (FLOPs of an input {shapes})"


def _without_compiling() -> AbstractContextManager[object]:
    """Let layers that hold compiled code run as they were written."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
