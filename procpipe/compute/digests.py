"""Detects partitions whose recomputation differs from their first forward.

    F(i)   output of the layers ──> projections on fixed random vectors, kept on the device
    R(i)   output of the layers ──> the same, compared

Bits cannot be compared: some kernels of torch give other last digits with a graph than without one
(on a CPU ``nn.LSTM`` in float32), or each time (atomic additions on a GPU). So outputs count as
equal if they differ by a small part of their size only: 4e-8 in float64, 1e-3 in float32, and 0.05
in shorter types, under autocast and on GPUs. A different dropout mask differs by far more.

A digest reads the output twice, and on a GPU the host waits for the numbers at the end of R. So
only ``MINI_BATCHES`` are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

#: Which of the mini-batches with recomputation are compared; the first is 1.
MINI_BATCHES = (1, 2, 4, 8)

#: The largest difference, as a part of the values: where rounding is coarse or differs each time.
_COARSE = 0.05

#: What recomputation repeats, for errors.
REPEATED = (
    "Repeated are the global generators of torch, random and numpy.random, and buffers "
    "(register_buffer, for a counter): use these, or checkpoint='never'"
)


class Digest(NamedTuple):
    """Some tensors: what each is; and of each with numbers its projection, and its size."""

    forms: list[tuple[torch.dtype, tuple[int, ...]]]
    sums: list[Tensor]  # (2,) float64, on its device


def digest_of(tensors: Iterable[Tensor]) -> Digest:
    """Return the digest of tensors; does not wait for their device."""
    given = list(tensors)
    with torch.no_grad():
        return Digest(
            [(tensor.dtype, tuple(tensor.shape)) for tensor in given],
            [_sums(tensor) for tensor in given if _has_numbers(tensor)],
        )


def difference(first: Digest, again: Digest, *, is_coarse: bool) -> str:
    """Return in words how a recomputation differs; ``is_coarse`` under autocast and on GPUs."""
    if first.forms != again.forms:
        return f"{_in_words(again)} instead of {_in_words(first)}"
    eps = _coarsest_eps(first)
    tolerance = _COARSE if is_coarse else min(_COARSE, 3 * math.sqrt(eps))
    pairs = [(*a.tolist(), *b.tolist()) for a, b in zip(first.sums, again.sums, strict=True)]
    # What rounding leaves of numbers that cancel, near 1 or as large as the others.
    rest = 8 * eps * max([1.0, *(pair[1] for pair in pairs if math.isfinite(pair[1]))])
    for ours, size, theirs, other_size in pairs:
        apart, size = abs(ours - theirs), max(size, other_size)
        if math.isfinite(ours) != math.isfinite(theirs) or apart > max(tolerance * size, rest):
            return f"values that differ by about {apart / size:.2g} of their size"
    return ""


def _has_numbers(tensor: Tensor) -> bool:
    is_plain = type(tensor.detach()) is Tensor and tensor.layout == torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_quantized or tensor.numel() == 0)


def _sums(tensor: Tensor) -> Tensor:
    """Project a matrix by a random vector for its columns and one for its rows.

    So the vectors are short, and a large tensor is read by few kernels and not copied.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensor = tensor.to(torch.float64)
    matrix = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    num_rows, num_columns = matrix.shape
    own = torch.Generator(tensor.device).manual_seed(0)
    vectors = torch.randn(
        num_rows + num_columns, generator=own, dtype=torch.float64, device=tensor.device
    )
    of_rows, of_columns = vectors.split([num_rows, num_columns])
    # Scaled, so that the products fit where the values do.
    of_columns = (of_columns / math.sqrt(num_columns)).to(matrix.dtype)
    with torch.autocast(tensor.device.type, enabled=False):
        projected = torch.dot(of_rows, matrix.mv(of_columns).to(torch.float64))
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    size = torch.linalg.vector_norm(matrix, dtype=dtype) / math.sqrt(num_columns)
    return torch.stack([projected, size.to(torch.float64)])


def _coarsest_eps(digest: Digest) -> float:
    """Return the rounding of the coarsest floating-point type among the tensors."""
    dtypes = [dtype for dtype, _ in digest.forms if dtype.is_floating_point or dtype.is_complex]
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _in_words(digest: Digest) -> str:
    words = [f"{str(dtype).removeprefix('torch.')} {shape}" for dtype, shape in digest.forms]
    return ", ".join(words) or "no tensor"
