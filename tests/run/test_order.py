"""Differences of ranks are whole sentences."""

from __future__ import annotations

from procpipe.run.coordinator import compare_facts


def test_every_difference_of_every_rank_is_a_sentence():
    facts = {"balance": [1, 2], "chunks": 4, "layers": ["a", "b", "c"]}

    *sentences, advice = compare_facts(
        [
            facts,
            {"balance": [2, 1], "chunks": 4, "layers": ["a", "x", "y"]},
            {"balance": [1, 2], "layers": ["a", "b"]},
        ]
    )
    assert 'balance="time", sample=x' in advice
    assert sentences == [
        "balance is [1, 2] on rank 0 and [2, 1] on rank 1",
        "a layer of the model is (b) on rank 0 and (x) on rank 1",
        "chunks is 4 on rank 0 and None on rank 2",
        "the model has 3 layers on rank 0 and 2 on rank 2",
    ]
