"""What autograd keeps inside layers for a backward pass, in bytes.

Memory counts once however many nodes keep it, without what is counted elsewhere: parameters, and a
partition's inputs and outputs. (A target that the loss saves counts twice.) Of a layer that uses
``torch.utils.checkpoint`` only what autograd keeps counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class SavedTensors:
    """Collects what is saved while its hooks are on; holds it as long as autograd would, or longer.

    Source: https://docs.pytorch.org/docs/2.13/autograd.html#torch.autograd.graph.saved_tensors_hooks
    """

    def __init__(self) -> None:
        self._saved: list[Tensor] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the hooks, to be used as a context."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def num_bytes(self, elsewhere: Iterable[Tensor]) -> int:
        """Return and forget what was saved, in bytes, without the memory of other tensors."""
        counted = {_memory(tensor) for tensor in elsewhere}
        sizes = {
            _memory(tensor): tensor.untyped_storage().nbytes()
            for tensor in self._saved
            if tensor.layout == torch.strided
        }
        self._saved.clear()
        return sum(size for memory, size in sizes.items() if memory not in counted)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor)
        return tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1
