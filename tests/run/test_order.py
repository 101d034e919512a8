"""Orders read back as written; differences of ranks are whole sentences."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from procpipe.run.coordinator import compare_facts
from procpipe.run.order import Order, encode, order_of

COUNTS = st.lists(st.integers(0, 10_000), max_size=5).map(tuple)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
).map(lambda value: tuple(value) if isinstance(value, list) else value)

ORDERS = st.builds(
    Order,
    call=st.text(),
    is_training=st.booleans(),
    is_grad_enabled=st.booleans(),
    plan=st.text(),
    plan_text=st.text(),
    sizes=COUNTS,
    weights=st.lists(st.floats(0, 1)).map(tuple),
    total_weight=st.none() | st.floats(0, 9),
    recompute=COUNTS,
    target=PLAIN,
    detail=PLAIN,
)


@given(ORDERS)
def test_an_order_reads_back(order):
    assert order_of(json.loads(encode(order))) == order


def test_an_order_is_short():
    order = Order("step", plan="0123456789abcdef", sizes=(2, 2), weights=(2.0, 2.0))

    assert encode(order) == (
        b'["step",true,true,"","0123456789abcdef","",[2,2],[2.0,2.0],null,1,[],"local",true,null]'
    )


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
