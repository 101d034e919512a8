"""Compares models as pipelines of one, two and three processes with the plain models, in float64.

For each case: the loss, gradients and buffers of a step in train mode for mini-batches of two
sizes, and the loss in eval mode.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

import procpipe
from tests.cutting.cases import CASES
from tests.dist.stages import stage_of

CHUNKS = 2

#: The order of additions in gradients of what several layers use, and of micro-batches.
TOLERANCE = 1e-13

#: Mini-batches whose micro-batches have two samples each, and three and two. With a single sample
#: transformers makes masks by another branch, which is an error.
SIZES = (4, 5)

#: A name, a schedule, what is recomputed, and the number of processes.
Way = tuple[str, str, str, int]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return CASES[name].make().double().train()


def loss_of(name: str) -> Any:
    output = CASES[name].output
    return lambda result: output(result).square().mean()


@functools.cache
def truth_of(name: str) -> dict[Any, Any]:
    """Return losses, gradients and buffers of the plain model over the same micro-batches."""
    case, model = CASES[name], model_of(name)
    found: dict[Any, Any] = {}
    for size in SIZES:
        args, named = case.inputs(size)
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        length = -(-size // CHUNKS)
        for start in range(0, size, length):
            part, named_part = cut((args, named), start, length)
            share = min(length, size - start) / size
            loss = loss_of(name)(model(*part, **named_part)) * share
            loss.backward()
            total += loss.detach()
        found[size] = total, gradients_of(model), buffers_of(model)
    if False in case.modes:
        model.eval()
        args, named = case.inputs(4)
        with torch.no_grad():
            parts = [cut((args, named), start, 2) for start in (0, 2)]
            found["eval"] = sum(loss_of(name)(model(*a, **n)) for a, n in parts) / 2
    return found


def cut(value: Any, start: int, length: int) -> Any:
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor[start : start + length], value
    )


def gradients_of(module, keys=str):
    """Return the gradients of a module under all of its names, or what ``keys`` makes of these."""
    named = module.named_parameters(remove_duplicate=False)
    return {keys(key): None if p.grad is None else p.grad.clone() for key, p in named}


def buffers_of(module, keys=str):
    return {keys(key): buffer.clone() for key, buffer in module.named_buffers()}


def even(num_layers: int, number: int) -> list[int]:
    """Return a balance of parts of about the same number of layers."""
    ends = [num_layers * k // number for k in range(number + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def steps(bare: Any, ways: Iterable[Way]) -> dict[Way, Any]:
    """Run every case; a pipeline of two processes is one of the first two."""
    return {way: run_one(bare, way) for way in ways if bare.rank < way[-1]}


def run_one(bare: Any, way: Way) -> dict[Any, Any]:
    name, schedule, checkpoint, number = way
    case = CASES[name]
    args, named = case.inputs(2)
    layers: Any = procpipe.sequential(model_of(name), *args, **named, **case.options)
    some = replace(bare, num_ranks=number, devices=bare.devices[:number])
    options = {"chunks": CHUNKS, "schedule": schedule, "checkpoint": checkpoint}
    found: dict[Any, Any] = {}
    balance = even(len(layers), number)
    with stage_of(some, f"{way}", layers, balance, loss_fn=loss_of(name), **options) as stage:
        for size in SIZES:
            args, named = case.inputs(size)
            stage.zero_grad()
            loss = stage.step(*args, target=None, **named)
            found[size] = loss, gradients_of(stage, layers.keys), buffers_of(stage, layers.keys)
        if False in case.modes:
            stage.eval()
            args, named = case.inputs(4)
            found["eval"] = stage.step(*args, target=None, **named)
    return found


def differences(way: Way, of_ranks: Iterable[dict[Any, Any]]) -> list[str]:
    """Describe what of the ranks' results is not the plain model's."""
    expected, faults = truth_of(way[0]), []
    keys: dict[Any, set[str]] = {}
    for rank, found in enumerate(of_ranks):
        where = f"{way[1]}, {way[2]}, rank {rank} of {way[3]}"
        for size, of_size in found.items():
            if size == "eval":
                faults += _compare(of_size, expected["eval"], f"{where}: loss in eval mode")
                continue
            loss, gradients, buffers = expected[size]
            faults += _compare(of_size[0], loss, f"{where}: loss of {size}")
            for key, gradient in of_size[1].items():
                faults += _compare(gradient, gradients[key], f"{where}: gradient of {key}")
            for key, buffer in of_size[2].items():
                faults += _compare(buffer, buffers[key], f"{where}: buffer {key}")
            keys.setdefault(size, set()).update(of_size[1])
    faults += [
        f"{way}: parameters {sorted(of_model)}"
        for size, found_keys in keys.items()
        if (of_model := found_keys ^ expected[size][1].keys())
    ]
    return faults


def _compare(found: Any, expected: Any, what: str) -> list[str]:
    if expected is None or found is None:
        is_same = all(value is None or not value.any() for value in (found, expected))
        return [] if is_same else [f"{what}: {found} and not {expected}"]
    difference = float((found - expected).abs().max()) if found.numel() else 0.0
    limit = TOLERANCE * (1 + float(expected.abs().max()) if found.numel() else 1)
    return [] if difference <= limit else [f"{what}: off by {difference:.1e}"]


def ways_of(name: str, numbers: Iterable[int] = (1, 2, 3)) -> list[Way]:
    """Return all ways in which a case is compared."""
    return [
        (name, schedule, checkpoint, number)
        for number in numbers
        for schedule in ("gpipe", "1f1b")
        for checkpoint in ("never", "always")
    ]
