"""Gradient clipping over all stages, with the norm of the plain model to the last digit.

``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters' norms. So every stage sends the
norms of its own parameters, by partition; in the model's order they are what one process has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

#: A norm as plain JSON: its dtype's name and its value. Stages may have gradients of different
#: dtypes, or none; the total has the dtype that torch gives it.
Norm = tuple[str, float]

#: ``agree(ours, combine)``: every rank's value to rank 0, and what it makes of them to every rank.
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]


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


def clip(
    by_partition: Mapping[int, Sequence[Tensor]],
    copies: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    agree: Agree,
    device: torch.device,
    *,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip this stage's gradients by the norm of all stages'; see ``Stage.clip_grad_norm_``.

    ``copies`` are gradients that another stage has, too, and counts. ``agree`` brings the norms of
    all ranks together, see ``Control.agree``. The returned norm is on ``device``.
    """
    ours = [(j, norms(of_partition, norm_type)) for j, of_partition in by_partition.items()]
    norm = as_tensor(agree(ours, lambda of_all: total_norm(of_all, norm_type))).to(device)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradients' norm over all stages is {norm}, so they cannot be clipped; "
            "look for the layer that makes it so, or leave error_if_nonfinite off"
        )
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in chain(*by_partition.values(), copies):
        gradient.mul_(coefficient.to(gradient.device))
    return norm


def _as_json(norm: Tensor) -> Norm:
    return str(norm.dtype).removeprefix("torch."), float(norm)
