"""Buffers that layers change, equal on all replicas after each forward pass in training.

Those of deferred batch normalisation are of the whole mini-batch. Others, such as the running
statistics of ``nn.BatchNorm2d``, are those of replica 0, as in torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.replicas.group import Group


class Buffers:
    """The buffers of one stage.

    Args:
        group: the processes that run this stage.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen: dict[int, int] = {}

    def note(self, layer: nn.Module) -> None:
        """Note that a layer's buffers are equal now."""
        self._seen |= {id(buffer): buffer._version for buffer in layer.buffers()}

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Make the buffers of layers in training mode equal; all of the group call it."""
        others: list[Tensor] = []
        changed: list[bool] = []
        for module in (each for layer in layers for each in layer.modules() if each.training):
            if isinstance(module, DeferredBatchNorm):
                if module.running_mean is not None:
                    module.join_moments(self._group.gathered(module.moments()))
            else:
                # Torch's normalisations change theirs without a new version.
                is_always = hasattr(module, "running_mean")
                for buffer in module.buffers(recurse=False):
                    others.append(buffer)
                    changed.append(is_always or self._seen.get(id(buffer)) != buffer._version)
        if not others:
            return
        flags = torch.tensor(changed, dtype=torch.int32)  # on the hosts, which wait for no device
        self._group.begin_sum(flags).wait()
        for buffer, is_changed in zip(others, flags.tolist(), strict=True):
            if is_changed:
                self._group.copy_first(buffer)
                self._seen[id(buffer)] = buffer._version
