"""Metadata as bytes; the cases of all transports test that it reads back as it was written."""

from __future__ import annotations

import torch

from procpipe.channel.meta import dense


def test_only_tensors_that_are_not_dense_are_copied():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (x, x.permute(2, 0, 1), x[1:], x[:, :, :1].squeeze(2).contiguous(), x[:0]):
        assert dense(tensor) is tensor
    for tensor in (x[:, ::2], x[:, :, 1], x[:1].expand(5, 3, 4), torch.complex(x, x).conj()):
        made = dense(tensor)
        assert torch.equal(made, tensor)
        assert made.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
