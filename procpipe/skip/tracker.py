"""Keeps stashed tensors, by their names and namespaces, until they are popped.

A layer's ``stash`` and ``pop`` go to the tracker of the present context: one of its own in a
plain ``nn.Sequential``; in a pipeline one for each task, which also has what comes from and goes to
other stages.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Namespace:
    """Keeps the names of some layers apart from the same names of others.

    Two namespaces differ; a copy of one (of a module that was copied, say) equals it.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.Namespace``.
    """

    _id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __repr__(self) -> str:
        return f"<Namespace {self._id[:8]}>"


class SkipKey(NamedTuple):
    """Identifies a skip tensor: its name, and the namespace of its layers."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} in {self.namespace!r}"


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

    def left(self, key: SkipKey, default: Any) -> Any:
        """Return what is stashed under a key and not popped by all layers, else ``default``."""
        tensor, _ = self._tensors.get(key, (default, 0))
        return tensor


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
