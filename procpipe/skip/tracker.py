"""Keeps stashed tensors until they are popped.

A layer's ``stash`` and ``pop`` go to the tracker of the present context: one of its own in a
plain ``nn.Sequential``; in a pipeline one for each task, which also has what comes from and goes to
other stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from procpipe.skip.namespace import SkipKey


class Tracker:
    """Keeps stashed tensors until the last layer has popped them."""

    def __init__(self) -> None:
        self._tensors: dict[SkipKey, tuple[Tensor | None, int]] = {}

    def stash(self, key: SkipKey, tensor: Tensor | None, num_pops: int) -> None:
        """Keep a tensor for the ``num_pops`` layers that will pop it."""
        self._tensors[key] = tensor, num_pops

    def pop(self, key: SkipKey) -> Tensor | None:
        """Return the tensor to one of them.

        Raises:
            RuntimeError: nothing is stashed under this key, or all layers have popped it.
        """
        if key not in self._tensors:
            raise RuntimeError(
                f"skip tensor {key} is popped but was not stashed: run the layer that stashes it "
                "first, in the same forward pass"
            )
        tensor, num_pops = self._tensors.pop(key)
        if num_pops > 1:
            self._tensors[key] = tensor, num_pops - 1
        return tensor

    def __len__(self) -> int:
        return len(self._tensors)


_tracker: ContextVar[Tracker | None] = ContextVar("procpipe skip tracker", default=None)


def current_tracker() -> Tracker:
    """Return the tracker of the present context, a plain one by default."""
    tracker = _tracker.get()
    if tracker is None:
        tracker = Tracker()
        _tracker.set(tracker)
    return tracker


@contextmanager
def tracking(tracker: Tracker) -> Iterator[None]:
    """Use a tracker for a while."""
    token = _tracker.set(tracker)
    try:
        yield
    finally:
        _tracker.reset(token)
