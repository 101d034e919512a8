"""Adds up the losses of replicas, once a step.

A replica without samples has no loss, and so does not know its dtype: it learns that from the
others with the first sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from procpipe.replicas.group import Group
from procpipe.run.log import Log

#: The dtypes that a loss can have.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class LossSum:
    """The sum of the losses of all replicas."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._dtype: torch.dtype | None = None  # None until it is known

    def total(self, loss: Tensor | None, log: Log) -> Tensor:
        """Return the loss of all replicas, from that of this one; None where it has no samples."""
        vector = torch.zeros(1 + len(_DTYPES), dtype=torch.float64, device=self._device)
        if loss is not None:
            self._dtype = loss.dtype
            vector[0] = loss
            vector[1 + _DTYPES.index(self._dtype)] = 1
        with log.awaited_sum("loss", vector.nbytes):
            self._group.begin_sum(vector).wait()
        if self._dtype is None:  # there were no samples here up to now; on a GPU the host waits
            _, *num_of_dtype = vector.tolist()
            self._dtype = _DTYPES[num_of_dtype.index(max(num_of_dtype))]
        return vector[0].to(self._dtype)
