"""How much memory operations take at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """Notes the most bytes of memory that an operation's result has."""

    most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.most = max(self.most, *(t.untyped_storage().nbytes() for t in made), 0)
        return result
