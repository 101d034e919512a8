"""Metadata as bytes; the cases of all transports test that it reads back as it was written."""

from __future__ import annotations

import pytest
import torch

from procpipe.channel.meta import TensorMeta, decode, describe, encode
from procpipe.tree import TENSOR, Flat
from tests.cases import for_each


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
