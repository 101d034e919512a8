"""The benchmark of procpipe.hf: its halves are the model, and its table has the ratios."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import hf_models
from benchmarks.hf import best, tabulate

_TIMES = {
    "procpipe.hf gpipe": [0.2, 0.4],
    "procpipe, two layers gpipe": [0.2, 0.3],
    "procpipe, two layers 1f1b": [0.1, 0.2],
    "torch gpipe": [0.3, 0.4],
    "one process": [0.4, 0.4],
}


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_the_halves_are_the_model(name):
    model = hf_models.model_of(name, 6, width=16).double()
    tokens = torch.randint(hf_models.NUM_WORDS, (2, 6))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    halves = hf_models.plain_sequential(name, model)
    other = hf_models.untied(name, 6, width=16).double()

    expected = model(input_ids=tokens, attention_mask=mask).logits

    torch.testing.assert_close(halves[1](halves[0](tokens, mask)), expected)
    torch.testing.assert_close(other(input_ids=tokens, attention_mask=mask).logits, expected)
    assert {id(p) for p in halves.parameters()} == {id(p) for p in model.parameters()}
    assert other.lm_head.weight is not other.get_input_embeddings().weight


def test_ratios_are_to_the_best_schedule():
    assert best(_TIMES, "procpipe, two layers") == "procpipe, two layers 1f1b"
    table = tabulate("gpt2", {"times": _TIMES, "processors": _TIMES}, 4, 2, 16)

    assert table.headings[2:4] == ["of procpipe, two layers 1f1b", "of torch gpipe"]
    row = [300, 2, 5 / 6, 0.75, 300, 2]
    assert table.rows[0][1:] == pytest.approx(row)
