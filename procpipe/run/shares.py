"""A mini-batch of which each replica's first rank reads its own share, or nothing.

first rank of each replica      share ── sizes, weights ──>     rank 0
rank 0                          the order of all shares ──>     every rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from procpipe.compute.ledger import num_bytes
from procpipe.data.loss import Loss
from procpipe.data.microbatch import scatter_like
from procpipe.data.minibatch import Ingoing, Inputs
from procpipe.job.grid import Grid
from procpipe.run.messages import LOCAL, ROUTED
from procpipe.run.replicas import Replicas


class OwnShare:
    """What this rank has of a mini-batch; nothing at first. A step has a ``loss``."""

    def __init__(self, loss: Loss | None, grid: Grid, device: torch.device) -> None:
        self.ingoing: Ingoing | None = None
        self.targets: Sequence[Any] | None = None
        self.sizes: tuple[int, ...] = ()
        self.recompute: tuple[int, ...] = ()
        self._weights: Sequence[float] = ()
        self._loss = loss
        self._grid = grid
        self._device = device

    def scatter(self, inputs: Inputs, target: Any, chunks: int) -> None:
        """Take a share, on the first rank of a replica; what other ranks give is left out."""
        if self._grid.stage != 0:
            return
        self.ingoing = Ingoing.of(inputs, chunks, self._device)
        self.sizes = self.ingoing.sizes
        if self._loss is not None:
            self.targets = None if target is None else scatter_like(target, self.sizes)
            self._weights = self._loss.weights(self.targets, self.sizes, is_share=True)

    def together(self, replicas: Replicas, *, is_routed: bool) -> dict[str, Any]:
        """Bring all shares to rank 0; return there what the order says of them.

        ``is_routed``: whether targets travel from the first stage to the last.

        Raises:
            ValueError: no replica has any.
        """
        input_bytes = num_bytes(self.ingoing.inputs[0].tensors) if self.ingoing else 0
        has_targets = self.targets is not None
        offers = replicas.gather_offers(
            [list(self.sizes), list(self.recompute), list(self._weights), input_bytes, has_targets]
        )
        if self._grid.rank != 0:
            return {}
        sizes, recompute, weights, of_inputs, of_targets = zip(*offers, strict=True)
        if not any(sizes):
            raise ValueError(
                "no replica has a mini-batch: in a loop over batches(…, sharded=True) give what it "
                "yields, on the first rank of each replica"
            )
        all_weights = tuple(chain(*weights))
        if self._loss is not None:
            self._loss.warn_of_weights(all_weights)
        return {
            "shares": tuple(zip(map(tuple, sizes), map(tuple, recompute), strict=True)),
            "sizes": self.sizes,
            "recompute": self.recompute,
            "input_bytes": max(of_inputs),
            "weights": all_weights,
            "whole": math.fsum(all_weights),
            "is_sharded": True,
            "target": ROUTED if is_routed and any(of_targets) else LOCAL,
        }
