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
            saved += [
                (f"{name!r} of a {type(module).__name__}", one)
                for name, one in module._buffers.items()
                if is_persistent(module, name)
            ]
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
    """Check that each buffer has the same shape and dtype on all replicas.

    Gloo ends a process by SIGABRT if sizes differ. The hosts compare, and wait for no device.
    """
    forms = [
        f"{what} is " + ("None" if one is None else f"{tuple(one.shape)} of {one.dtype}")
        for what, one in saved
    ]
    digests = torch.tensor([zlib.crc32(form.encode()) for form in forms])
    together = torch.tensor([len(forms), zlib.crc32(digests.numpy().tobytes())])
    of_all = group.gathered(together)
    if all(torch.equal(one, together) for one in of_all):
        return
    numbers = sorted({int(one[0]) for one in of_all})
    if len(numbers) > 1:
        raise RuntimeError(
            f"one replica has {numbers[0]} saved buffers in modules that train, and another "
            f"{numbers[-1]}: register buffers, and call train() and eval() of modules, on all "
            "replicas alike"
        )
    differs = torch.stack([one != digests for one in group.gathered(digests)]).any(0)
    raise RuntimeError(
        f"the buffer {forms[int(differs.int().argmax())]} on this rank, and of another shape or "
        "dtype on another replica, so replicas cannot have it in common: register it with "
        "persistent=False if each of them may have its own, or keep its shape"
    )
