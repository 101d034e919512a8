"""The bytes of tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the elements of some tensors; ``None`` counts nothing."""
    # Not nbytes, which sparse tensors do not have.
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)
