"""Buffers of layers, equal on all replicas after each forward pass in training.

Those of deferred batch normalisation are of the whole mini-batch. Other saved ones, such as the
running statistics of ``nn.BatchNorm2d``, are those of replica 0, as in torch's
DistributedDataParallel. Buffers that are not saved, such as rotary tables, are each replica's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.replicas.group import Group
from procpipe.torch_internals import is_persistent


def join_buffers(layers: Iterable[nn.Module], group: Group) -> None:
    """Make the buffers of modules in training mode equal; all of the group call it, and wait.

    Those of all layers travel together: a model may have many small ones.

    Raises:
        RuntimeError: the number, a shape or a dtype of saved buffers differs between replicas.
    """
    deferred: list[DeferredBatchNorm] = []
    saved: list[tuple[str, Tensor | None]] = []
    for module in dict.fromkeys(module for layer in layers for module in layer.modules()):
        if not module.training:
            continue
        if not isinstance(module, DeferredBatchNorm):
            saved += [each for each in module._buffers.items() if is_persistent(module, each[0])]
        elif module.running_mean is not None:
            deferred.append(module)
    if deferred:
        _join_moments(deferred, group)
    if saved:
        _check_forms(saved, group)
        group.copy_first(buffer for _, buffer in saved if buffer is not None)


def _join_moments(modules: Sequence[DeferredBatchNorm], group: Group) -> None:
    """Join what batch normalisations have recorded."""
    ours = [module.moments() for module in modules]
    of_all = [part.split([*map(len, ours)]) for part in group.gathered(torch.cat(ours))]
    for module, moments in zip(modules, zip(*of_all, strict=True), strict=True):
        module.join_moments(moments)


def _check_forms(saved: Sequence[tuple[str, Tensor | None]], group: Group) -> None:
    """Check that all replicas have the same buffers, by shape and dtype.

    Gloo ends a process by SIGABRT if sizes differ. The hosts compare, and wait for no device.
    """
    forms = [(what, None if one is None else (one.shape, one.dtype)) for what, one in saved]
    digest = torch.tensor([zlib.crc32(repr(forms).encode())])
    if not all(torch.equal(one, digest) for one in group.gathered(digest)):
        raise RuntimeError(
            f"the saved buffers of modules that train, {len(forms)} on this rank, differ between "
            "replicas in number, shape or dtype, so replicas cannot have them in common: call "
            "train() and eval() of modules on all replicas alike, and register buffers whose shape "
            "changes with persistent=False"
        )
