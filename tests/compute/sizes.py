"""How much memory an operation allocates, and a split backward holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from procpipe.compute.segment import Segment


class Sizes(TorchDispatchMode):
    """Records the most bytes of new memory in an operation's result."""

    most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        made = [t.untyped_storage() for t in tensors_in(result)]
        new = [memory.nbytes() for memory in made if memory.data_ptr() not in given]
        self.most = max(self.most, *new, 0)
        return result


def put_off_bytes(partition: Segment, i: int) -> int:
    """Return the bytes that a partition holds from task I of a micro-batch to its task W."""
    waiting = partition._put_off[i].waiting
    calls = [call for of_layer in waiting.values() for call in of_layer]
    kept = [tensor for call in calls for tensor in (call.x, call.gradient)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
