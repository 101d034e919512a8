"""Orders read back as written; differences of ranks are whole sentences."""

from __future__ import annotations

import json

from procpipe.run.coordinator import compare_facts
from procpipe.run.order import Order, encode, order_of


def test_an_order_is_short_and_reads_back():
    order = Order("step", plan="0123456789abcdef", sizes=(2, 2), weights=(2.0, 0.1))
    text = encode(order)
    assert text == (
        b'["step",true,true,"","0123456789abcdef","",[2,2],[2.0,0.1],null,1,[],"local",true,null]'
    )
    assert order_of(json.loads(text)) == order


def test_every_difference_of_every_rank_is_a_sentence():
    facts = {"balance": [1, 2], "chunks": 4, "layers": ["a", "b", "c"]}

    assert compare_facts(
        [
            facts,
            {"balance": [2, 1], "chunks": 4, "layers": ["a", "x", "y"]},
            {"balance": [1, 2], "layers": ["a", "b"]},
        ]
    ) == [
        "balance is [1, 2] on rank 0 and [2, 1] on rank 1",
        "a layer of the model is (b) on rank 0 and (x) on rank 1",
        "chunks is 4 on rank 0 and None on rank 2",
        "the model has 3 layers on rank 0 and 2 on rank 2",
    ]
