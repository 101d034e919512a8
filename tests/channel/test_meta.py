"""Metadata reads back as it was written; other bytes are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from procpipe.channel.meta import Meta, TensorMeta, decode, describe, encode
from procpipe.tree import TENSOR, Flat, flatten
from tests.cases import for_each

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers()
VALUES = st.recursive(
    PLAIN | st.just(torch.empty(0)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)
ANY = st.lists(st.integers(0, 2**40), max_size=5), st.just(False)
CHANNELS_LAST = st.lists(st.integers(0, 9), min_size=4, max_size=5), st.just(True)
TENSORS = st.one_of(
    [
        st.builds(TensorMeta, shape.map(tuple), st.sampled_from(DTYPES), st.booleans(), is_last)
        for shape, is_last in (ANY, CHANNELS_LAST)
    ]
)


@given(
    VALUES.flatmap(
        lambda v: st.tuples(
            st.just(v), st.lists(TENSORS, min_size=len(flatten(v)[0]), max_size=len(flatten(v)[0]))
        )
    )
)
def test_metadata_reads_back(drawn):
    value, tensors = drawn
    meta = Meta(flatten(value)[1], tuple(tensors))

    # repr, because nan is not equal to itself, and 1 is equal to True.
    assert repr(decode(encode(meta))) == repr(meta)


@for_each(
    "data",
    [
        b"[" * 100_000,
        b'["*",[["ab","float32",true]]]',
        b'["*",[[[-1],"float32",true]]]',
        b'["*",[[[1.5],"float32",true]]]',
        b'["*",[[[true],"float32",true]]]',
        b'["*",[[[1],"float33",true]]]',
        b'["*",[[[1],"compile",true]]]',
        b'["*",[[[1],5,true]]]',
        b'["*",[[[1],"float32"]]]',
        b'["*",[[[1,1,1],"float32",true,true]]]',
        b'["*",[[[1,1,1,1],"float32",true,true,1]]]',
        *(b'["*"]', b"null", b"\xff", b""),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="not the metadata of a message"):
        decode(data)


def test_a_message_is_described():
    message = Flat([torch.ones(2, 3), torch.tensor(True)], ("t", (TENSOR, TENSOR)), (True, False))

    meta = describe(message)

    assert meta.structure == ("t", (TENSOR, TENSOR))
    assert meta.tensors == (
        TensorMeta((2, 3), torch.float32, True),
        TensorMeta((), torch.bool, False),
    )
    assert meta.requires_grad == (True, False)
    assert meta.num_bytes == 2 * 3 * 4 + 1
    assert encode(meta) == b'[["t",["*","*"]],[[[2,3],"float32",true],[[],"bool",false]]]'
