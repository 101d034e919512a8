"""Detects partitions whose recomputation differs from their first forward.

    F(i)   output of the layers ──> projections on fixed random vectors, kept on the device
    R(i)   output of the layers ──> the same, compared

Bits cannot be compared: some kernels give other last digits each time (atomic additions on a GPU).
So outputs count as equal if they differ by a small part of their size only: 4e-8 in float64, 1e-3
in float32, and 0.05 in shorter types, under autocast and on GPUs. A different dropout mask differs
by far more.

A digest reads the output twice, and on a GPU the host waits for the numbers at the end of R. So
only ``MINI_BATCHES`` are compared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from procpipe.torch_internals import pytree
from procpipe.tree import is_dense

#: Which of the mini-batches with recomputation are compared; the first is 1.
MINI_BATCHES = (1, 2, 4, 8)

#: The largest difference, as a part of the values: where rounding is coarse or differs each time.
_COARSE = 0.05

#: Of each tensor its rounding, and its projection and size: ``(2,)`` float64, on its device.
Digest = list[tuple[float, Tensor]]


def digest_of(value: Any) -> Digest:
    """Return the digest of what may have gradients in a value; does not wait for the device."""
    with torch.no_grad():
        return [
            (torch.finfo(leaf.dtype).eps, _sums(leaf))
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
            if is_dense(leaf) and leaf.numel()
        ]


def difference(first: Digest, again: Digest, *, is_coarse: bool) -> str:
    """Return in words how a recomputation differs; ``is_coarse`` under autocast and on GPUs."""
    if len(first) != len(again):
        return f"{len(again)} tensors instead of {len(first)}"
    eps = max((eps for eps, _ in first), default=0.0)
    tolerance = _COARSE if is_coarse else min(_COARSE, 3 * math.sqrt(eps))
    pairs = [(*a.tolist(), *b.tolist()) for (_, a), (_, b) in zip(first, again, strict=True)]
    # What rounding leaves of numbers that cancel, near 1 or as large as the others.
    rest = 8 * eps * max([1.0, *(pair[1] for pair in pairs if math.isfinite(pair[1]))])
    for ours, size, theirs, other_size in pairs:
        apart, size = abs(ours - theirs), max(size, other_size)
        if math.isfinite(ours) != math.isfinite(theirs) or apart > max(tolerance * size, rest):
            return f"values that differ by about {apart / size:.2g} of their size"
    return ""


def _sums(tensor: Tensor) -> Tensor:
    """Project a matrix by a random vector for its columns and one for its rows.

    So the vectors are short, and a large tensor is read by few kernels and not copied.
    """
    if tensor.dtype.itemsize == 1:  # which has no products
        tensor = tensor.to(torch.float32)
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
