"""Adds up the losses of replicas, once a step.

A replica without samples has no loss, and so knows neither its dtype nor whether it is a sum with a
weight: it learns both from the others with the first sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procpipe.data.mean_loss import LossPart
from procpipe.data.minibatch import MiniBatch
from procpipe.replicas.group import Group
from procpipe.run.log import Log

#: The dtypes that a loss can have.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class LossSum:
    """The sum of the losses of all replicas; on the first one, its loss may warn of it."""

    def __init__(self, group: Group, device: torch.device, *, is_first: bool) -> None:
        self._group = group
        self._device = device
        self._is_first = is_first
        self._is_weighted = False
        self._dtype: torch.dtype | None = None  # None until it is known

    def total(self, part: LossPart | None, batch: MiniBatch, log: Log) -> LossPart | None:
        """Return the part of all replicas, from that of this one; None where it has no samples."""
        vector = torch.zeros(3 + len(_DTYPES), dtype=torch.float64, device=self._device)
        if part is not None:
            self._is_weighted, self._dtype = isinstance(part.weight, Tensor), part.sum.dtype
            vector[0], vector[2] = part.sum, self._is_weighted
            if isinstance(part.weight, Tensor):
                vector[1] = part.weight
            vector[3 + _DTYPES.index(self._dtype)] = 1
        with log.awaited_sum("loss", vector.nbytes):
            self._group.begin_sum(vector).wait()
        if self._dtype is None:  # there were no samples here up to now; on a GPU the host waits
            _, _, num_weighted, *num_of_dtype = vector.tolist()
            self._is_weighted = num_weighted > 0
            self._dtype = _DTYPES[num_of_dtype.index(max(num_of_dtype))]
        loss = vector[0].to(self._dtype)
        if not self._is_weighted:
            return LossPart(loss)
        if batch.loss is not None and self._is_first:
            batch.loss.warn_of_sum(vector[1])
        divisor = batch.expected if batch.may_correct else None
        return LossPart(loss, vector[1], None if divisor is None else divisor.to(self._device))
