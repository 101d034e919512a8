"""Finds a balance: divides the measured costs of layers into partitions, as evenly as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from procpipe.balance.blocks import blocks, check_num_partitions
from procpipe.balance.profile import check_model, layer_sizes, layer_times


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Balance a model by the seconds of its layers' forward and backward.

    Runs in this process only, and blocks. Seconds differ from run to run, so processes that must
    agree use the balance that one of them found.

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
        chunks: micro-batches in a mini-batch; the activations of one count, as the others are
            recomputed.
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
