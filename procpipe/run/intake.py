"""Begins a mini-batch on every rank of a replica: scatters it, issues its order, brings the target.

first rank   input ── scatter ── order: sizes, weights, where the target is ──> its other ranks
             target ── one message ──> the last stage; or it is there already: given by the user, or
                                       delivered by ``batches``
"""

from __future__ import annotations

import math
from typing import Any

import torch

from procpipe.data.loss import Loss, MeanLoss, divisors
from procpipe.data.microbatch import scatter, scatter_like
from procpipe.data.minibatch import Inputs, MiniBatch
from procpipe.data.upload import on_device
from procpipe.errors import DisagreementError
from procpipe.job.grid import Grid
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.run.batches import Batches
from procpipe.run.coordinator import Agree
from procpipe.run.order import LOCAL, SENT, Order
from procpipe.run.runner import Runner
from procpipe.run.same_input import described, differences


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
        self._num_calls = 0  # of ``stage(input)``

    def begin(
        self,
        pipeline: Runner,
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
            again = tuple(sorted(recomputed(checkpoint, len(sizes)))) if keeps else ()
            decided = {"reduces": reduces, "sizes": tuple(sizes), "recompute": again}
            if call == "step":
                decided |= divisors(total_weight, accumulate)
                if target is not None and self._output_stage != 0:
                    place = self._batches.delivered(target) or SENT
                    decided |= {"target": place, "weights": self._loss.weights(target, sizes)}
        order = pipeline.coordinator.begin(call, is_training=is_training, **decided)
        count = order.counted
        if call == "step":
            if order.target == SENT and self._grid.stage == 0:
                pipeline.wires.send_target(target)
            if self._grid.stage == self._output_stage:
                batch.loss = self._mean_loss(order, target, pipeline)
                count = math.fsum(batch.loss.weights)
        pipeline.coordinator.announce(order, count)
        if call == "forward" and (order.is_shared or self._grid.num_replicas == 1):
            self._check_same(inputs, pipeline.coordinator.agree_in_call)
        return order, batch

    def _check_same(self, inputs: Any, agree: Agree) -> None:
        """Compare the inputs of ``stage(input)``; every rank waits in calls 1, 2, 4, 8, ….

        Raises:
            DisagreementError: a rank's is another than its replica's first; raised on every rank.
        """
        self._num_calls += 1
        if self._grid.num_stages == 1 or self._num_calls.bit_count() != 1:
            return
        faults = agree(
            described(inputs), lambda of_all: differences(of_all, self._grid, self._num_calls)
        )
        if faults:
            raise DisagreementError(faults)

    def _mean_loss(self, order: Order, target: Any, pipeline: Runner) -> MeanLoss:
        """Return, on the last stage, the loss of a step; ``target`` is what the user gave here."""
        if order.target == SENT:
            target = pipeline.wires.take_target()
        elif order.target != LOCAL:
            target = self._batches.target_of(*order.target)
        return MeanLoss(
            self._loss,
            scatter_like(on_device(target, self._device), order.sizes),
            order.weights or self._loss.weights(self._batches.as_read(target), order.sizes),
            lambda: math.fsum(pipeline.coordinator.meet()),  # of all replicas
            order.total_weight,
            order.accumulate,
        )
