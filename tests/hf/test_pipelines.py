"""All families as pipelines of one, two and three processes, against transformers in float64."""

from __future__ import annotations

from typing import Any

import torch

from procpipe import Stage, hf
from tests.dist.stages import stage_of
from tests.hf.cases import CASES, batch_of, loss_of, model_of, output_of

CHUNKS = 2

#: Float32 inside of transformers' norms and rotary tables; other micro-batches round differently.
TOLERANCE = 1e-12


def truth_of(name, chunks=CHUNKS):
    """Return the loss and the gradients of the plain model over the same micro-batches."""
    model = model_of(name)
    batch, labels = batch_of(name)
    size = -(-len(labels) // chunks)
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


def step_of(stage, name):
    """Run a step; return the loss, and this stage's gradients and buffers by key."""
    batch, labels = batch_of(name)
    loss = stage.step(**batch, labels=labels)
    keys: Any = hf.sequential(model_of(name)).keys
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
        layers = hf.sequential(model_of(name))
        stage = Stage(layers, [len(layers)], chunks=CHUNKS, loss_fn=loss_of(name))
        found = step_of(stage, name)

        expected = truth_of(name)
        assert_same(found, expected, name)
        assert found[1].keys() == expected[1].keys(), name


def test_all_families_in_several_processes(ranks):
    found = ranks(3).run(steps, world=False, timeout_s=100).values()

    for case in found[0]:
        name = case[0]
        of_ranks = [of_rank[case] for of_rank in found if case in of_rank]
        expected = truth_of(name)
        for rank, of_rank in enumerate(of_ranks):
            assert_same(of_rank, expected, f"{case} on rank {rank}")
        keys = set().union(*(gradients for _, gradients, _ in of_ranks))
        assert keys == expected[1].keys(), case


def steps(bare):
    """Run a step of every case, and two cases in other schedules."""
    done = {}
    cases = [(name, "gpipe") for name in CASES]
    cases += [(name, way) for name in ("GPT-2", "Llama") for way in ("1f1b", "zb-h1")]
    for name, way in cases:
        layers = hf.sequential(model_of(name))
        balance = [len(layers) // 3 + 1, len(layers) // 3]
        balance.append(len(layers) - sum(balance))
        options = {"chunks": CHUNKS, "schedule": way, "loss_fn": loss_of(name)}
        with stage_of(bare, f"{name}, {way}", layers, balance, **options) as stage:
            done[name, way] = step_of(stage, name)
    return done
