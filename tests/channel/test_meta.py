"""Metadata as bytes; the cases of all transports test that it reads back as it was written."""

from __future__ import annotations

import torch

from procpipe.channel.meta import TensorMeta, describe, encode
from procpipe.tree import Flat


def test_a_message_is_described():
    message = Flat([torch.ones(2, 3), torch.tensor(True)], ("form", "[]"), (True, False))

    meta = describe(message)

    assert meta.structure == ("form", "[]")
    assert meta.tensors == (
        TensorMeta((2, 3), torch.float32, True),
        TensorMeta((), torch.bool, False),
    )
    assert meta.requires_grad == (True, False)
    assert meta.num_bytes == 2 * 3 * 4 + 1
    tensors = b'[[[2,3],"float32",true,false],[[],"bool",false,false]]'
    assert encode(meta) == b'[["form","[]"],' + tensors + b"]"
