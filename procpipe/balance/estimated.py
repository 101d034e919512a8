"""A balance without a measurement: each layer's parameters, and its estimated work.

    model ── copy on the meta device ── forward of an input without values ── FLOPs of each layer
      └───── parameters of each layer ─────────────────────────────────────────────┴──> blocks

Nothing is computed and nothing is copied but shapes. So every rank finds the same for itself, for a
model of any size. The input is what the user or the model gives, else a guess from the first layer
with a weight; where the layers cannot run on it, the parameters alone decide. The layers' hooks run
too, with tensors that have no values.

A layer's cost is one sample's forward FLOPs and 10 for each parameter. Per training step, a
parameter costs as much as some 1000 FLOPs: its gradient and the optimizer's state are read and
written, about 40 bytes. Those FLOPs are 3 (forward and backward) times 32 samples times 10.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from procpipe.balance.alone import Inputs, LayerAlone, as_flat, run_each
from procpipe.balance.blocks import blocks, check_num_partitions

#: What a parameter costs, in FLOPs of one sample's forward.
_FLOPS_PER_PARAMETER = 10

#: Batch normalisation needs two samples.
_NUM_SAMPLES = 2
_LENGTH = 128
_IMAGE_SIZES = (64, 224, 32, 28, 16, 8)  # some models flatten images of one size


def estimated_balance(
    num_partitions: int, module: nn.Sequential, sample: Any = None
) -> tuple[list[int], str]:
    """Balance a model by its parameters and its estimated work.

    Runs in this process only. Depends on the model's and the sample's shapes alone.

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
    balance = blocks(costs, num_partitions)
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
