"""Buffers that layers change, equal on all replicas after each forward pass in training.

Those of deferred batch normalisation are of the whole mini-batch. Others, such as the running
statistics of ``nn.BatchNorm2d``, are those of replica 0, as in torch's DistributedDataParallel.
Buffers that layers register later, and those that are not saved and whose shapes differ between
replicas, are caches: each replica has its own.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.replicas.group import Group

#: Of a buffer on one replica: it is equal, it may not be, its form is another than it was.
_UNCHANGED, _CHANGED, _OTHER_FORM = 0, 1, 1 << 16


@dataclass
class _Noted:
    """One buffer when it was equal on all replicas: its form, which tensor it was, its version."""

    form: tuple[torch.dtype, torch.Size] | None
    ref: weakref.ref[Tensor] | None
    version: int | None

    @classmethod
    def of(cls, buffer: Tensor | None) -> _Noted:
        if buffer is None:
            return cls(None, None, None)
        version = None if buffer.is_inference() else buffer._version
        return cls((buffer.dtype, buffer.shape), weakref.ref(buffer), version)

    def flag(self, buffer: Tensor | None) -> int:
        """Say whether a buffer is what it was."""
        now = _Noted.of(buffer)
        if now.form != self.form:
            return _OTHER_FORM
        # A weak reference, as a tensor that is gone may have had the same id.
        is_same = (self.ref and self.ref()) is buffer and now.version == self.version
        return _UNCHANGED if is_same and (now.version is not None or not now.form) else _CHANGED


class ReplicaBuffers:
    """The buffers of one stage, which the processes of a group run."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._noted: dict[nn.Module, dict[tuple[str, str], _Noted]] = {}

    def note(self, layer: nn.Module) -> None:
        """Note that a layer's buffers are equal now."""
        self._noted[layer] = {
            (path, name): _Noted.of(buffer)
            for path, module in layer.named_modules()
            for name, buffer in module._buffers.items()
        }

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Make the buffers of layers in training mode equal; all of the group call it.

        Those of all layers travel together: a model may have many small ones.

        Raises:
            RuntimeError: the shapes or dtypes of a buffer that is saved differ between replicas.
        """
        deferred: list[DeferredBatchNorm] = []
        others: list[tuple[nn.Module, str, _Noted]] = []
        flags: list[int] = []
        for layer in layers:
            noted = self._noted.get(layer, {})
            for path, module in layer.named_modules():
                if not module.training:
                    continue
                if isinstance(module, DeferredBatchNorm):
                    if module.running_mean is not None:
                        deferred.append(module)
                    continue
                # Torch's normalisations change theirs without a new version.
                is_always = getattr(module, "running_mean", None) is not None
                for name, buffer in module._buffers.items():
                    if (then := noted.get((path, name))) is not None:
                        others.append((module, name, then))
                        flags.append(max(then.flag(buffer), is_always))
        if deferred:
            self._join_moments(deferred)
        if others:
            self._make_equal(others, flags)

    def _join_moments(self, modules: Sequence[DeferredBatchNorm]) -> None:
        """Join what batch normalisations have recorded."""
        ours = [module.moments() for module in modules]
        of_all = [part.split([*map(len, ours)]) for part in self._group.gathered(torch.cat(ours))]
        for module, moments in zip(modules, zip(*of_all, strict=True), strict=True):
            module.join_moments(moments)

    def _make_equal(self, others: list[tuple[nn.Module, str, _Noted]], flags: list[int]) -> None:
        """Copy those of replica 0 of which any replica's flag is not ``_UNCHANGED``."""
        totals = torch.tensor(flags, dtype=torch.int32)  # on the hosts, which wait for no device
        self._group.begin_sum(totals).wait()
        changed = [
            (module._buffers[name], then)
            for (module, name, then), total in zip(others, totals.tolist(), strict=True)
            if total and (total < _OTHER_FORM or self._is_of_one_form(module, name))
        ]
        self._group.copy_first(buffer for buffer, _ in changed if buffer is not None)
        for buffer, then in changed:
            vars(then).update(vars(_Noted.of(buffer)))

    def _is_of_one_form(self, module: nn.Module, name: str) -> bool:
        form = _Noted.of(module._buffers[name]).form
        found = self._group.gathered(torch.tensor([zlib.crc32(repr(form).encode())]))
        if all(torch.equal(one, found[0]) for one in found):
            return True
        if name not in module.state_dict():
            return False
        here = "None" if form is None else f"{tuple(form[1])} of {form[0]}"
        raise RuntimeError(
            f"the buffer {name!r} of a {type(module).__name__} is {here} on this rank, and of "
            "another shape or dtype on another replica, so replicas cannot have it in common: "
            "register it with persistent=False if each of them may have its own, or keep its shape"
        )
