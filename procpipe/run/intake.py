"""Begins a mini-batch on every rank of a replica: scatters it, issues its order, brings the target.

first rank   input ── scatter ── order: sizes, weights, where the target is ──> its other ranks
             target ── one message ──> the last stage; or it is there already: given by the user, or
                                       delivered by ``batches``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from procpipe.data.loss import Loss, checked_accumulate, checked_total
from procpipe.data.mean_loss import MeanLoss
from procpipe.data.microbatch import scatter, scatter_like
from procpipe.data.minibatch import Inputs, MiniBatch, on_device
from procpipe.job.grid import Grid
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.run.batches import Batches
from procpipe.run.coordinator import Coordinator
from procpipe.run.order import DELIVERED, LOCAL, SENT, Order
from procpipe.run.wiring import Wires


@cache
def _recomputed(checkpoint: str, m: int) -> tuple[int, ...]:
    return tuple(sorted(recomputed(checkpoint, m)))


class Intake:
    """One rank's side of beginning mini-batches.

    ``batches`` knows which target the last stage has; ``output_stage`` is that of the last
    partition.
    """

    def __init__(
        self, loss: Loss, batches: Batches, grid: Grid, output_stage: int, device: torch.device
    ) -> None:
        self._loss = loss
        self._batches = batches
        self._grid = grid
        self._output_stage = output_stage
        self._device = device

    def begin(
        self,
        coordinator: Coordinator,
        wires: Wires,
        call: str,
        inputs: Inputs,
        target: Any = None,
        total_weight: Any = None,
        accumulate: Any = None,
        *,
        chunks: int,
        checkpoint: str,
        is_training: bool,
        reduces: bool,
    ) -> tuple[Order, MiniBatch]:
        """Scatter the mini-batch and issue its order on the first rank; follow the order elsewhere.

        ``call`` is "step" or "forward". The first rank's inputs, ``total_weight``, ``accumulate``,
        ``chunks`` and ``checkpoint`` count; so does its target, or else that of the last stage.
        """
        batch, decided = MiniBatch(), dict[str, Any]()
        if self._grid.stage == 0:
            parts, sizes = scatter(inputs, chunks)  # step 1
            batch.add_inputs(parts, self._device)
            keeps = is_training and torch.is_grad_enabled()
            chosen = _recomputed(checkpoint, len(sizes)) if keeps else ()
            decided = {"reduces": reduces, "sizes": tuple(sizes), "recompute": chosen}
            if call == "step":
                decided["accumulate"] = checked_accumulate(accumulate, total_weight)
                decided["total_weight"] = checked_total(total_weight)
                decided |= self._about_loss(target, sizes)
        order = coordinator.begin(call, is_training=is_training, **decided)
        batch.keep, batch.reduces = order.is_grad_enabled, order.reduces
        batch.is_shared = order.is_shared and self._grid.num_replicas > 1
        count = order.count
        if call == "step":
            batch.is_step = True
            batch.keep = batch.is_backward = order.keeps_graph
            if order.target == SENT and self._grid.stage == 0:
                wires.send_target(target)
            if self._grid.stage == self._output_stage:
                count = self._add_loss(batch, order, target, coordinator, wires)
        coordinator.announce(order, count)
        return order, batch

    def _about_loss(self, target: Any, sizes: Sequence[int]) -> dict[str, Any]:
        """Return what the order says of a step's target and weights."""
        way, place = SENT, 0
        if target is None or self._output_stage == 0:
            way = LOCAL
        elif (
            self._batches.delivered and (found := self._batches.find_delivered(target)) is not None
        ):
            way, place = DELIVERED, found
        about: dict[str, Any] = {"target": way, "delivered": place}
        if way != LOCAL or self._loss.weight is None:
            about["weights"] = self._weights(None if way == LOCAL else target, sizes)
        return about

    def _weights(self, target: Any, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return what each micro-batch counts."""
        return self._loss.weights(None if target is None else scatter_like(target, sizes), sizes)

    def _add_loss(
        self,
        batch: MiniBatch,
        order: Order,
        target: Any,
        coordinator: Coordinator,
        wires: Wires,
    ) -> float:
        """Add, on the last stage, targets and loss of a step; return what the mini-batch counts.

        ``target`` is what the user gave on this rank.
        """
        if order.target == SENT:
            target = wires.take_target()
        elif order.target == DELIVERED:
            target = self._batches.delivered[order.delivered]
        if target is None:
            self._loss.check_takes_one()
        on_host = self._batches.on_host(target) if order.target == LOCAL else None
        self._loss.warn_of_ignored(on_host)
        weights = order.weights
        if not weights:  # only this stage has the target
            weights = self._weights(on_host, order.sizes)
        if target is not None:
            batch.targets = scatter_like(on_device(target, self._device), order.sizes)

        batch.loss = MeanLoss(
            self._loss,
            weights,
            lambda: math.fsum(coordinator.meet()),  # of all replicas
            order.total_weight,
            accumulate=order.accumulate,
            is_sent=batch.is_shared or not order.weights,
        )
        return math.fsum(weights)
