"""A checksum of the inputs depends on every bit and its place, and on nothing else."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from procpipe import NoChunk, Remote
from procpipe.run.same_input import checksum, described
from tests.cases import case

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
)


def test_every_bit_counts_in_every_dtype() -> None:
    torch.manual_seed(1)
    for dtype in DTYPES:
        with case(str(dtype)):
            tensor = (torch.randn(3, 5) * 9).to(dtype)
            found = {checksum(tensor)}
            num_bits = 1 if dtype == torch.bool else 8
            raw = tensor.flatten().view(torch.uint8)
            for k in range(len(raw)):
                for bit in range(num_bits):
                    raw[k] ^= 1 << bit
                    found.add(checksum(tensor))
                    raw[k] ^= 1 << bit
            assert len(found) == 1 + len(raw) * num_bits


def test_strides_and_views_do_not_count() -> None:
    tensor = torch.randn(4, 6, dtype=torch.complex64)
    for same in (tensor.T.contiguous().T, torch.cat([tensor, tensor])[4:], tensor.conj().conj()):
        assert checksum(same) == checksum(tensor)
    assert checksum(tensor.conj()) == checksum(tensor.conj().resolve_conj())
    wide = torch.randn(4, 12)
    assert checksum(wide[:, 3::2]) == checksum(wide[:, 3::2].contiguous())
    parameter = torch.nn.Parameter(wide)
    with torch.inference_mode():
        assert checksum(parameter.detach()) == checksum(wide) == checksum(wide.clone())


def test_what_is_compared_of_an_input() -> None:
    x = torch.ones(2, 3)
    one = ["float32 (2, 3)", checksum(x)]
    remote = Remote(0, "the mini-batch", None)
    sparse = torch.tensor([1.0, 0.0]).to_sparse()
    cases: list[tuple[Any, Any]] = [
        ((), []),
        ((None,), []),
        ((1, "a", object(), [b"x"]), []),
        ((remote,), []),
        ((x, {"mask": remote}), []),
        ((x, OrderedDict(mask=remote)), []),
        ((x,), [one]),
        ((x, None, 3), [one]),
        ({0: NoChunk(x), "b": OrderedDict(c=[x])}, [one, one]),
        ((torch.ones(0, 3), x), [["float32 (0, 3)", None], one]),
        ((torch.ones(2, device="meta"),), [["float32 (2,)", None]]),
        ((sparse,), [["float32 (2,)", None]]),
    ]
    for inputs, expected in cases:
        with case(str(inputs)):
            assert described(inputs) == expected
