"""All families as pipelines of one, two and three processes, against transformers in float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from procpipe import Stage, hf
from procpipe.hf import families
from tests.dist.stages import stage_of
from tests.hf.cases import CASES, MORE, batch_of, class_of, loss_of, model_of
from tests.hf.compare import CHUNKS, assert_same, even, names, rows_of, step_of, table, truth_of


def test_all_classes_of_the_table_are_cases():
    assert families.COMPARED == {class_of(name).__name__ for name in CASES | MORE}
    assert families.COMPARED == {class_of(name).__name__ for name in names()}
    page = Path(__file__).parents[2] / "docs/language_models.md"
    assert table(dict.fromkeys(names(), "")) in page.read_text()


def test_all_families_in_one_process():
    for name in CASES | MORE:
        layers: Any = hf.sequential(model_of(name))
        stage = Stage(layers, [len(layers)], chunks=CHUNKS, loss_fn=loss_of(name))
        found = step_of(stage, layers.keys, name)

        expected = truth_of(name)
        assert_same(found, expected, name)
        assert found[1].keys() == expected[1].keys(), name


#: Schedules of two cases each, on three processes.
OTHERS = [(name, way, 3) for name in ("GPT-2", "Llama") for way in ("1f1b", "zb-h1")]


def test_all_families_in_two_and_three_processes(ranks):
    cases = [*((name, "gpipe", number) for name in CASES for number in (3, 2)), *OTHERS]
    found = ranks(3).run(steps, cases, world=False, timeout_s=100).values()

    for case in cases:
        name, _, number = case
        expected = truth_of(name)
        for rank, of_rank in enumerate(found[:number]):
            assert_same(of_rank[case], expected, f"{case} on rank {rank}")
        keys = set().union(*(of_rank[case][1] for of_rank in found[:number]))
        assert keys == expected[1].keys(), case


def steps(bare, cases):
    """Run a step of every case; a pipeline of two processes is one of the first two."""
    layers_of = functools.cache(lambda name: hf.sequential(model_of(name)))
    done = {}
    for name, way, number in cases:
        if bare.rank < number:
            layers: Any = layers_of(name)
            some = replace(bare, num_ranks=number, devices=bare.devices[:number])
            options = {"chunks": CHUNKS, "schedule": way, "loss_fn": loss_of(name)}
            balance = even(len(layers), number)
            with stage_of(some, f"{name}, {way}, {number}", layers, balance, **options) as stage:
                done[name, way, number] = step_of(stage, layers.keys, name)
    return done


def test_the_table_of_the_page_is_compared(ranks, tmp_path):
    """``python -m tests.hf`` compares all models, on one, two and three processes."""
    chosen = ["Mixtral", "Falcon", "Mamba 2", "gpt-oss"]
    found = rows_of(ranks, chosen, [2], tmp_path)

    assert found == dict.fromkeys(chosen, "")
    assert "| Mamba 2 | `Mamba2ForCausalLM` | right and left | - | both | yes |" in table(found)


def test_bfloat16_autocast_is_that_of_the_plain_model(ranks):
    name = "Llama"
    model = model_of(name).float()
    batch, labels = batch_of(name)
    size = -(-len(labels) // CHUNKS)
    loss_fn, parts = loss_of(name), []
    for k in range(0, len(labels), size):
        inputs = {key: value[k : k + size] for key, value in batch.items()}
        # One for each, since parameters that it has converted are kept until its end.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mean = loss_fn(model(**inputs, use_cache=False).logits, labels[k : k + size])
        count = loss_fn.num_counted(labels[k : k + size]).item()
        parts.append(mean * (count / loss_fn.num_counted(labels).item()))
    for part in reversed(parts):
        part.backward()
    loss = sum(part.detach() for part in parts)
    exact = truth_of(name)[0]

    found = ranks(2).run(autocast_step, name, world=False).values()

    assert 1e-5 < abs(loss.item() - exact) < 0.05, "it was computed in 16 bits"
    assert {kind for _, _, kind in found} == {torch.bfloat16}
    for rank, (of_rank, gradients, _) in enumerate(found):
        assert abs(of_rank - loss) <= 1e-6, rank
        for key, gradient in gradients.items():
            expected = dict(model.named_parameters())[key].grad
            difference = (gradient - expected).abs().max()
            assert difference <= 1e-6 * (1 + expected.abs().max()), (rank, key, difference)


def autocast_step(bare, name):
    """Run a step under autocast; return the loss, the gradients, and the dtype of the blocks."""
    layers: Any = hf.sequential(model_of(name).float())
    kinds = set()
    balance = even(len(layers), 2)
    with stage_of(bare, name, layers, balance, chunks=CHUNKS, loss_fn=loss_of(name)) as stage:
        for key, module in stage.named_modules():
            if key.endswith("q_proj"):
                module.register_forward_hook(lambda *given: kinds.add(given[2].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, gradients, _ = step_of(stage, layers.keys, name)
    (kind,) = kinds
    return loss, gradients, kind
