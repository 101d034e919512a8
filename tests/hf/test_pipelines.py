"""Models as pipelines of several processes, against transformers in float64."""

from __future__ import annotations

from pathlib import Path

from procpipe.hf import compared
from tests.hf.cases import CASES, class_of
from tests.hf.compare import (
    rows_of,
    summary,
)

#: Tied or not; with position embeddings, windows, routers, states in place of keys.
SOME = [("GPT-2", True), ("Gemma 3", False), ("Mixtral", True), ("Mamba 2", False)]


def test_all_classes_of_the_page_are_cases():
    assert compared.COMPARED == {class_of(name).__name__ for name in CASES}
    page = Path(__file__).parents[2] / "docs/language_models.md"
    assert summary(dict.fromkeys(CASES, "")) in page.read_text()


def test_some_of_the_page_are_those_of_transformers(ranks, tmp_path):
    """``python -m tests.hf`` compares all models, on one, two and three processes."""
    found = rows_of(ranks, SOME, [3], tmp_path)

    assert found == {name: "" for name, _ in SOME}
