"""Reduces the layers of a partition one by one, within the last backward pass that adds to them.

    layer       2                     1                     0
    forward     └ calls               └ calls               └ calls          noted in ``following``
    backward    enter ── backward ──> enter ── backward ──> enter ── backward
                └ allow 2             │ 2 is reduced:       │ 1 is not:
                                      └ allow 1             └ 0 follows after the pass
    FSDP        ............ reduce 2 ............ reduce 1

Processes that share layers must reduce them in one order: from the last layer to the first. The
order of a backward pass may be another one, and another one in each pipeline: a layer that a
micro-batch does not reach is left out, and one whose input requires no gradient is reduced at the
end of the pass. So FSDP may reduce a layer in the pass only if all later ones are reduced, and the
caller reduces the rest after the pass. Wherever a pipeline stops, the order is the same.

A layer is allowed as the pass enters it, while its parameters are gathered; it is reduced when they
are shards again, since FSDP shards and reduces in one function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from procpipe.errors import BoundaryError
from procpipe.sharded.units import Unit, set_last
from procpipe.tree import flatten


class LastPass:
    """The last backward pass of a partition, whose ``roots`` are reduced in this order."""

    def __init__(self, roots: Iterable[Unit]) -> None:
        self.is_allowed = False  # whether FSDP may reduce in the pass
        self._roots = [*roots]
        self._num_calls = [0] * len(self._roots)
        self._num_allowed = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the forward task of the pass's micro-batch."""
        with ExitStack() as stack:
            for k, root in enumerate(self._roots):
                handle = root.module.register_forward_hook(partial(self._called, k))
                stack.callback(handle.remove)
            yield

    @property
    def num_reduced(self) -> int:
        """How many of the roots FSDP has reduced in the pass: the first ones."""
        allowed = self._roots[: self._num_allowed]
        assert all(root.is_sharded for root in allowed), "FSDP shards what it reduces"
        return self._num_allowed

    def _called(self, k: int, module: Any, inputs: Any, output: Any) -> None:
        self._num_calls[k] += 1
        try:
            tensors, _ = flatten(output)
        except BoundaryError:
            return
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._enter, k))

    def _enter(self, k: int, gradient: Tensor) -> None:
        """Let FSDP reduce a layer, if it is its turn; an output's gradient has been computed."""
        if not self.is_allowed or k != self._num_allowed or self._num_calls[k] != 1:
            return  # FSDP would reduce a layer that is called twice after each of both
        if (k == 0 or self._roots[k - 1].is_sharded) and not self._roots[k].is_sharded:
            self._num_allowed += 1
            set_last(self._roots[k].module)
