"""Models as pipelines of several processes, against transformers in float64.

With ``PROCPIPE_HF=all`` these are all models of docs/language_models.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from procpipe.hf import compared
from tests.hf.cases import CASES, class_of
from tests.hf.compare import kinds_of, rows_of, summary

#: Tied or not; with position embeddings, windows, routers, states in place of keys.
SOME = [("GPT-2", True), ("Gemma 3", False), ("Mixtral", True), ("Mamba 2", False)]


def test_all_classes_of_the_page_are_cases():
    assert compared.COMPARED == {class_of(name).__name__ for name in CASES}
    page = Path(__file__).parents[2] / "docs/language_models.md"
    assert summary(CASES) in page.read_text()


@pytest.mark.timeout(3600 if os.environ.get("PROCPIPE_HF") == "all" else 120)
def test_models_of_the_page_are_those_of_transformers(ranks, tmp_path):
    is_all = os.environ.get("PROCPIPE_HF") == "all"
    kinds, numbers = (kinds_of(CASES), [1, 2, 3]) if is_all else (SOME, [3])
    found = rows_of(ranks, kinds, numbers, tmp_path)

    assert found == {name: "" for name, _ in kinds}
