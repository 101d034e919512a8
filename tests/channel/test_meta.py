"""Metadata as bytes; the cases of all transports test that it reads back as it was written."""

from __future__ import annotations

import torch

from procpipe.channel.meta import ALIGNMENT, TensorMeta, decode, dense, encode
from procpipe.tree import Flat


def test_a_message_is_described():
    tensors = [torch.ones(3, 2).T, torch.tensor(True)]
    message = Flat(tensors, ("form", "[]"), (True, False))

    encoded = encode(message, tensors)
    meta = decode(encoded)

    written = b'[["form","[]"],[[[2,3],[1,2],"float32"],[[],[],"bool"]],[true,false]]'
    assert encoded == written.ljust(ALIGNMENT)
    assert meta.structure == ("form", "[]")
    assert meta.tensors == (
        TensorMeta((2, 3), (1, 2), torch.float32),
        TensorMeta((), (), torch.bool),
    )
    assert meta.requires_grad == (True, False)
    assert [place[1:] for place in meta.places] == [(6, 0), (1, ALIGNMENT)]


def test_only_tensors_that_are_not_dense_are_copied():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (x, x.permute(2, 0, 1), x[1:], x[:, :, :1].squeeze(2).contiguous(), x[:0]):
        assert dense(tensor) is tensor
    for tensor in (x[:, ::2], x[:, :, 1], x[:1].expand(5, 3, 4), torch.complex(x, x).conj()):
        made = dense(tensor)
        assert torch.equal(made, tensor)
        assert made.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
