"""Models as pipelines of several processes, against transformers in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from procpipe import Stage, hf
from procpipe.hf import compared
from tests.hf.cases import CASES, class_of, loss_of, model_of
from tests.hf.compare import (
    CHUNKS,
    assert_same,
    plain_step,
    rows_of,
    step_of,
    summary,
    truth_of,
)

#: Tied or not; with position embeddings, windows, routers, states in place of keys.
SOME = [("GPT-2", True), ("Gemma 3", False), ("Mixtral", True), ("Mamba 2", False)]


def test_all_classes_of_the_page_are_cases():
    assert compared.COMPARED == {class_of(name).__name__ for name in CASES}
    page = Path(__file__).parents[2] / "docs/language_models.md"
    assert summary(dict.fromkeys(CASES, "")) in page.read_text()


def test_some_of_the_page_are_those_of_transformers(ranks, tmp_path):
    """``python -m tests.hf`` compares all models, on one, two and three processes."""
    found = rows_of(ranks, SOME, [2, 3], tmp_path)

    assert found == {name: "" for name, _ in SOME}


def test_bfloat16_autocast_is_that_of_the_plain_model():
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    layers: Any = hf.sequential(model_of("Llama").float())
    stage = Stage(layers, [len(layers)], chunks=CHUNKS, loss_fn=loss_of("Llama"))
    kinds = set()
    for key, module in stage.named_modules():
        if key.endswith("q_proj"):
            module.register_forward_hook(lambda *given: kinds.add(given[2].dtype))

    with autocast():
        found = step_of(stage, layers.keys, "Llama")

    expected = plain_step(model_of("Llama").float(), "Llama", surroundings=autocast)
    assert_same(found, expected, "bfloat16", tolerance=1e-6)
    assert kinds == {torch.bfloat16}
    assert 1e-5 < abs(found[0] - truth_of("Llama")[0]) < 0.05
