"""Gradient clipping over all stages, with the norm of the plain model to the last digit.

``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters' norms. So it is enough that
every stage tells the norms of its own parameters: taken together in the model's order they are the
very numbers that one process would have.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_by_norm", "norms", "total_norm"]


def norms(gradients: Iterable[Tensor], norm_type: float) -> list[float]:
    """Return the norm of each gradient; waits for the device."""
    each = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
    return [float(norm) for norm in each]


def total_norm(
    norms_of_stages: Iterable[list[float]], norm_type: float, dtype: torch.dtype
) -> float:
    """Return the norm of all parameters' norms, computed as the plain model would."""
    together = [norm for of_stage in norms_of_stages for norm in of_stage]
    if not together:
        return 0.0
    return float(torch.linalg.vector_norm(torch.tensor(together, dtype=dtype), norm_type))


def clip_by_norm(gradients: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place by ``max_norm / norm`` where that is below 1."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device))
