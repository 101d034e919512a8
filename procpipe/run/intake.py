"""Begins a mini-batch on every rank of a replica: scatters it, issues its order, routes the target.

first rank   input ── scatter ── order: sizes, weights, where the target is ──> its other ranks
the target   goes along its route, or is on the last stage already: given there by the user, or
delivered by ``batches``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from procpipe.data.loss import Loss, checked_accumulate, checked_total
from procpipe.data.mean_loss import MeanLoss
from procpipe.data.microbatch import scatter, scatter_like
from procpipe.data.minibatch import Ingoing, Inputs, MiniBatch, on_device
from procpipe.job.grid import Grid
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.run.batches import Batches
from procpipe.run.coordinator import Coordinator
from procpipe.run.messages import DELIVERED, LOCAL, ROUTED, Order


class Intake:
    """One rank's side of beginning mini-batches.

    ``batches`` records which target the last stage has; ``output_stage`` is the stage of the last
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
        call: str,
        inputs: Inputs,
        target: Any,
        total_weight: Any = None,
        accumulate: Any = None,
        *,
        chunks: int,
        checkpoint: str,
        is_training: bool,
        reduces: bool,
    ) -> tuple[Order, MiniBatch, Ingoing | None]:
        """Scatter the mini-batch and issue its order on the first rank; follow the order elsewhere.

        ``call`` is "step" or "forward". The first rank's inputs, ``total_weight``, ``accumulate``,
        ``chunks`` and ``checkpoint`` count; so does its target, or else that of the last stage.
        """
        ingoing, targets = None, None
        decided: dict[str, Any] = {}
        if self._grid.stage == 0:
            parts, sizes = scatter(inputs, chunks)  # step 1
            ingoing = Ingoing.of_parts(parts, sizes, self._device)
            keeps = is_training and torch.is_grad_enabled()
            decided = {"reduces": reduces, "sizes": tuple(sizes)}
            decided["recompute"] = _recomputed(checkpoint, sizes, keeps=keeps)
            if call == "step":
                decided["accumulate"] = checked_accumulate(accumulate, total_weight)
                decided["total_weight"] = checked_total(total_weight)
                targets, about_loss = self._about_loss(target, sizes)
                decided |= about_loss
        order = coordinator.begin(call, is_training=is_training, **decided)
        batch = MiniBatch(
            ingoing.inputs if ingoing else None,
            keep=order.is_grad_enabled,
            is_shared=order.is_shared and self._grid.num_replicas > 1,
        )
        if call == "step":
            batch = self._with_loss(coordinator, batch, order, target, targets)
        else:
            coordinator.announce(order, order.count)
        return order, batch, ingoing

    def _about_loss(
        self, target: Any, sizes: Sequence[int]
    ) -> tuple[Sequence[Any] | None, dict[str, Any]]:
        """Return each micro-batch's target, if it is sent, and what the order says of it."""
        way, place = ROUTED, 0
        if target is None or self._output_stage == 0:
            way = LOCAL
        elif (found := self._batches.find_delivered(target)) is not None:
            way, place = DELIVERED, found
        weighs = self._loss.weight is not None
        targets = None if way == LOCAL else scatter_like(target, sizes)
        about: dict[str, Any] = {"target": way, "delivered": place}
        if not weighs or way != LOCAL:
            about["weights"] = self._loss.weights(targets, sizes)
        return targets if way == ROUTED else None, about

    def _with_loss(
        self,
        coordinator: Coordinator,
        batch: MiniBatch,
        order: Order,
        target: Any,
        given: Sequence[Any] | None,
    ) -> MiniBatch:
        """Add what a step needs to know of the loss.

        ``target`` is what the user gave on this rank; ``given``, of each micro-batch, what the
        first rank sends.
        """
        loss, count = None, order.count
        if self._grid.stage == self._output_stage:
            if given is None and order.target != ROUTED:
                given = self._own_targets(order, target)
            weights = order.weights
            if not weights:  # only this stage has the target
                on_host = self._batches.on_host(target)
                counted = None if on_host is None else scatter_like(on_host, order.sizes)
                weights = self._loss.weights(counted, order.sizes)
            count = math.fsum(weights)
            loss = MeanLoss(
                self._loss,
                weights,
                lambda: math.fsum(coordinator.meet()),  # of all replicas
                order.total_weight,
                accumulate=order.accumulate,
                is_sent=batch.is_shared or not order.weights,
            )
        coordinator.announce(order, count)
        return replace(
            batch,
            targets=None if given is None else [on_device(part, self._device) for part in given],
            loss=loss,
            keep=order.keeps_graph,
            reduces=order.reduces,
            is_backward=order.keeps_graph,
            is_step=True,
        )

    def _own_targets(self, order: Order, target: Any) -> Sequence[Any] | None:
        """Return, on a last stage, each micro-batch's target, if it has one that no rank sends."""
        if order.target == DELIVERED:
            target = self._batches.delivered[order.delivered]
        if order.target == LOCAL:
            self._loss.warn_of_ignored(self._batches.on_host(target))
        return None if target is None else scatter_like(target, order.sizes)


def _recomputed(checkpoint: str, sizes: Sequence[int], *, keeps: bool) -> tuple[int, ...]:
    """Return the micro-batches that are recomputed, if a backward pass follows."""
    return tuple(sorted(recomputed(checkpoint, len(sizes)))) if keeps else ()
