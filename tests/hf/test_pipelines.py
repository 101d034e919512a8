"""All families as pipelines of one, two and three processes, against transformers in float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from procpipe import Stage, hf
from tests.dist.stages import stage_of
from tests.hf.cases import CASES, batch_of, loss_of, model_of, output_of

CHUNKS = 2

#: Float32 inside of transformers' norms and rotary tables; other micro-batches round differently.
TOLERANCE = 1e-12


@functools.cache
def truth_of(name):
    """Return the loss and the gradients of the plain model over the same micro-batches."""
    model = model_of(name)
    batch, labels = batch_of(name)
    size = -(-len(labels) // CHUNKS)
    parts = [
        loss_of(name)(
            output_of(model, {key: value[k : k + size] for key, value in batch.items()}),
            labels[k : k + size],
        )
        for k in range(0, len(labels), size)
    ]
    loss = sum(total for total, _ in parts) / sum(weight for _, weight in parts)
    loss.backward()
    gradients = {
        key: parameter.grad for key, parameter in model.named_parameters(remove_duplicate=False)
    }
    return loss.detach(), gradients, dict(model.named_buffers())


def step_of(stage, keys, name, total_weight=None):
    """Run a step; return the loss, and this stage's gradients and buffers by key."""
    batch, labels = batch_of(name)
    loss = stage.step(**batch, labels=labels, total_weight=total_weight)
    named = stage.named_parameters(remove_duplicate=False)
    return (
        loss,
        {keys(key): parameter.grad for key, parameter in named},
        {keys(key): buffer for key, buffer in stage.named_buffers()},
    )


def assert_same(found, expected, what):
    """Compare losses, gradients and buffers, each with the name of what differs."""
    loss, gradients, buffers = expected
    assert abs(found[0] - loss) <= TOLERANCE, what
    for key, gradient in found[1].items():
        if gradients[key] is None:
            assert gradient is None or not gradient.any(), (what, key)
        else:
            difference = (gradient - gradients[key]).abs().max()
            assert difference <= TOLERANCE * (1 + gradients[key].abs().max()), (what, key)
    for key, buffer in found[2].items():
        assert torch.equal(buffer, buffers[key]), (what, key)


def test_all_families_in_one_process():
    for name in CASES:
        layers: Any = hf.sequential(model_of(name))
        stage = Stage(layers, [len(layers)], chunks=CHUNKS, loss_fn=loss_of(name))
        found = step_of(stage, layers.keys, name)

        expected = truth_of(name)
        assert_same(found, expected, name)
        assert found[1].keys() == expected[1].keys(), name


#: Schedules of two cases each.
OTHERS = [(name, way) for name in ("GPT-2", "Llama") for way in ("1f1b", "zb-h1")]

#: Also over two processes: tied in three places, untied, with masks by layer, experts, an encoder.
IN_TWO = ["GPT-2", "Llama", "Gemma 3", "Mixtral", "T5"]


def test_all_families_in_three_processes(ranks):
    assert_cases(ranks(3), [*((name, "gpipe") for name in CASES), *OTHERS])


def test_families_in_two_processes(ranks):
    assert_cases(ranks(2), [(name, "gpipe") for name in IN_TWO])


def assert_cases(processes, cases):
    """Compare what all ranks have of each case with the plain model."""
    found = processes.run(steps, cases, world=False, timeout_s=100).values()

    for case in cases:
        expected = truth_of(case[0])
        for rank, of_rank in enumerate(found):
            assert_same(of_rank[case], expected, f"{case} on rank {rank}")
        keys = set().union(*(of_rank[case][1] for of_rank in found))
        assert keys == expected[1].keys(), case


def steps(bare, cases):
    """Run a step of every case."""
    done = {}
    for name, way in cases:
        layers: Any = hf.sequential(model_of(name))
        ends = [len(layers) * k // bare.num_ranks for k in range(bare.num_ranks + 1)]
        balance = [end - start for start, end in itertools.pairwise(ends)]
        options = {"chunks": CHUNKS, "schedule": way, "loss_fn": loss_of(name)}
        with stage_of(bare, f"{name}, {way}", layers, balance, **options) as stage:
            # Where backward begins before all tokens are counted, gradients are scaled in the end,
            # which the parts of Llama in float32 would round otherwise.
            labels = batch_of(name)[1]
            weight = None if way == "gpipe" else int((labels[:, 1:] != -100).sum())
            done[name, way] = step_of(stage, layers.keys, name, weight)
    return done
