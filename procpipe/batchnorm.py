"""Batch normalisation with the running statistics of mini-batches.

``nn.BatchNorm2d`` in a pipeline would update its running statistics once a micro-batch: ``chunks``
times too often, with the variances of small batches, and again in recomputation. Here a forward
pass only records the micro-batch's statistics, and one commit a mini-batch joins them:

    begin()   forward(x[0:3])   forward(x[3:6])   …   commit()
    forget    record moments    join moments          running statistics, once

Each micro-batch is still normalised by its own statistics, as it cannot wait for the others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe.compute.recompute import is_recomputing
from procpipe.torch_internals import BatchNorm


class DeferredBatchNorm(BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` with running statistics updated once a mini-batch.

    After ``commit`` they are what ``nn.BatchNorm`` would have made of the whole mini-batch,
    however it was divided; ``state_dict`` is that of ``nn.BatchNorm`` too. The pipeline calls
    ``begin`` and ``commit``; without a pipeline, call them around the micro-batches of each
    mini-batch, or nothing is updated.

    The constructor's arguments are those of ``nn.BatchNorm2d``. The input is
    ``(batch/m, num_features, ...)`` of any floating dtype; float16 and bfloat16 are added up in
    float32. What is recorded between ``begin`` and ``commit`` is not part of the state dict.

    Source: torchgpipe 0.0.7, ``torchgpipe.batchnorm.DeferredBatchNorm``, which needs to know the
    number of micro-batches beforehand and adds up squares; this one needs neither.
    """

    _moments: _Moments | None = None

    def begin(self) -> None:
        """Start a mini-batch: forget the micro-batches of one that was not finished."""
        self._moments = None

    @torch.no_grad()
    def commit(self) -> None:
        """Finish a mini-batch: update the running statistics from all its micro-batches.

        Does nothing without one (in eval mode, say). Does not wait for the device.
        """
        moments, self._moments = self._moments, None
        if moments is None:
            return
        count, mean, squares = moments
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for running, latest in (
            (self.running_mean, mean),
            (self.running_var, squares / (count - 1)),
        ):
            assert running is not None
            if self.momentum is None:  # the average of all mini-batches so far
                running.lerp_(latest.to(running), 1 / self.num_batches_tracked.to(running))
            else:
                running.lerp_(latest.to(running), self.momentum)

    def moments(self) -> Tensor:
        """Return what was recorded since ``begin`` in one tensor, zeros if nothing was.

        Its first value is the number of values a channel; then come their means and the sums of
        their squared distances from it: ``(1 + 2 * num_features,)``, of float64.
        """
        assert self.running_mean is not None, "only statistics that are kept are joined"
        size, device = 1 + 2 * self.num_features, self.running_mean.device
        moments = torch.zeros(size, dtype=torch.float64, device=device)
        if self._moments is not None:
            moments[0], *rest = self._moments
            moments[1:] = torch.cat(rest)
        return moments

    def join_moments(self, of_all: Sequence[Tensor]) -> None:
        """Set what was recorded to what ``moments`` returned in several processes together."""
        f = self.num_features
        joined = reduce(_joined, [(each[0], each[1 : 1 + f], each[1 + f :]) for each in of_all])
        if self._moments is not None or joined[0]:  # on a GPU the host waits, without samples only
            self._moments = joined

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a micro-batch; in training, record its statistics for ``commit``.

        Returns:
            A tensor of the input's shape and dtype.

        Raises:
            ValueError: the input has no channel dimension, or in training only one value a channel.
        """
        self._check_input_dim(input)
        if not self.training or self.running_mean is None:
            return super().forward(input)
        # With momentum 1 the running statistics that F.batch_norm updates are the input's own, so
        # they cost no further pass over it. In recomputation they are made likewise, and dropped.
        dtype = torch.promote_types(self.running_mean.dtype, torch.float32)
        mean = torch.zeros(self.num_features, dtype=dtype, device=input.device)
        var = torch.zeros_like(mean)
        affine: tuple[Tensor | None, ...] = (self.weight, self.bias)
        weight, bias = (None if each is None else each.to(dtype) for each in affine)
        output = F.batch_norm(input, mean, var, weight, bias, True, momentum=1.0, eps=self.eps)
        if not is_recomputing():
            count = input.numel() // self.num_features
            latest = count, mean, var * (count - 1)
            before = self._moments
            self._moments = latest if before is None else _joined(before, latest)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"the input of DeferredBatchNorm has shape {tuple(input.shape)}: give it at least "
                "2 dimensions, (batch, channels, ...)"
            )

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module) -> nn.Module:
        """Replace the batch normalisations in a module by deferred ones.

        They share parameters, buffers and hooks with those they replace. A class with a forward of
        its own stays, such as ``nn.SyncBatchNorm``.

        Args:
            module: any module; its descendants are replaced in place.

        Returns:
            The module, or what replaces it.
        """

        @cache  # each once, although it may be used twice
        def replaced(one: Any) -> Any:
            if not isinstance(one, BatchNorm) or type(one).forward is not BatchNorm.forward:
                return one
            deferred = copy.copy(one)
            deferred.__class__ = cls
            return deferred

        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                parent._modules[name] = replaced(child)
        return cast("nn.Module", replaced(module))


#: Of the values of a channel in some micro-batches: their number (an int; 0-dim where several
#: processes have joined theirs), their mean, and the sum of their squared distances from it; of all
#: channels, ``(num_features,)``.
_Moments = tuple[Any, Tensor, Tensor]


def _joined(one: _Moments, other: _Moments) -> _Moments:
    """Return the moments of both sets of values.

    Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979); sums of plain squares would cancel.
    """
    count = one[0] + other[0]
    share = other[0] / (count + (count == 0))  # two processes may have no values
    distance = other[1] - one[1]
    squares = one[2] + other[2] + distance * distance * (one[0] * share)
    return count, one[1] + distance * share, squares
