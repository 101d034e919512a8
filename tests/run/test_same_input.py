"""A checksum of the inputs depends on every bit and its place, and on nothing else."""

from __future__ import annotations

from typing import Any

import torch

from procpipe import NoChunk, Remote
from procpipe.run.same_input import described
from tests.cases import case

DTYPES = torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64


def test_every_bit_counts_in_every_dtype() -> None:
    torch.manual_seed(1)
    for dtype in DTYPES:
        with case(str(dtype)):
            tensor = (torch.randn(3, 5) * 9).to(dtype)
            found = {str(described(tensor))}
            num_bits = 1 if dtype == torch.bool else 8
            raw = tensor.flatten().view(torch.uint8)
            for k in range(len(raw)):
                for bit in range(num_bits):
                    raw[k] ^= 1 << bit
                    found.add(str(described(tensor)))
                    raw[k] ^= 1 << bit
            assert len(found) == 1 + len(raw) * num_bits


def test_strides_and_views_do_not_count() -> None:
    tensor = torch.randn(4, 6, dtype=torch.complex64)
    for same in (tensor.T.contiguous().T, torch.cat([tensor, tensor])[4:], tensor.conj().conj()):
        assert described(same) == described(tensor)
    assert described(tensor.conj()) == described(tensor.conj().resolve_conj())
    wide = torch.randn(4, 12)
    assert described(wide[:, 3::2]) == described(wide[:, 3::2].contiguous())
    with torch.inference_mode():
        assert described(torch.nn.Parameter(wide)) == described(wide.clone())


def test_what_is_compared_of_an_input() -> None:
    x, remote = torch.ones(2, 3), Remote(0, "the mini-batch", None)
    form, checksum = described(x) or []
    sparse = torch.tensor([1.0, 0.0]).to_sparse()
    cases: list[tuple[Any, Any]] = [
        ((None, 1, "a", object(), [b"x"]), None),
        ((x, {"mask": remote}), None),
        ((torch.ones(0, 3), torch.ones(2, device="meta"), sparse), None),
        ((x, None, 3), ["float32 (2, 3)", checksum]),
        ((torch.ones(0, 3), x), [f"float32 (0, 3), {form}", checksum]),
        ({0: NoChunk(x), "b": None}, [form, checksum]),
    ]
    for inputs, expected in cases:
        with case(str(inputs)):
            assert described(inputs) == expected
