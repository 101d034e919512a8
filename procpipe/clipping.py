"""Gradient clipping over all stages, with the norm of the plain model to the last digit.

``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters' norms. So every stage sends the
norms of its own parameters, by partition; in the model's order they are what one process has.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: A norm as plain JSON: its dtype's name and its value. Stages may have gradients of different
#: dtypes, or none; the total has the dtype that torch gives it.
Norm = tuple[str, float]


def norms(gradients: Iterable[Tensor], norm_type: float) -> list[Norm]:
    """Return the norm of each gradient; waits for the device.

    The norm of a DTensor is that of the whole tensor: all processes that share it call this.
    """
    each = [torch.linalg.vector_norm(gradient, float(norm_type)) for gradient in gradients]
    return [_as_json(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) for norm in each]


def total_norm(of_stages: Iterable[Iterable[tuple[int, list[Norm]]]], norm_type: float) -> Norm:
    """Return the p-norm of the norms that each stage has for its partitions, by their indices."""
    in_order = sorted((j, of_part) for of_stage in of_stages for j, of_part in of_stage)
    together = [as_tensor(norm) for _, of_part in in_order for norm in of_part]
    if not together:
        return _as_json(torch.tensor(0.0))
    return _as_json(torch.linalg.vector_norm(torch.stack(together), float(norm_type)))


def as_tensor(norm: Norm) -> Tensor:
    """Return a norm as a 0-dim tensor on the CPU."""
    dtype, value = norm
    return torch.tensor(value, dtype=getattr(torch, dtype))


def clip_by_norm(gradients: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place by ``max_norm / norm`` where that is below 1."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device))


def _as_json(norm: Tensor) -> Norm:
    return str(norm.dtype).removeprefix("torch."), float(norm)
