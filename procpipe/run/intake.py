"""Begins a mini-batch on every rank: scatters it, issues its order, routes the target.

rank 0   input ── Ingoing.of ── order: sizes, weights, where the target is ──> every rank
the target   goes along its route, or is on the last stage already: given there by the user, or
delivered by ``batches``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from procpipe.compute.ledger import num_bytes
from procpipe.data.loss import Loss, MeanLoss, checked_total
from procpipe.data.microbatch import scatter_like
from procpipe.data.minibatch import Ingoing, Inputs, MiniBatch, on_device
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.run.batches import Batches
from procpipe.run.messages import DELIVERED, LOCAL, ROUTED, Order


class Intake:
    """One rank's side of beginning mini-batches.

    Args:
        issue_or_follow: issues an order on rank 0 and follows it elsewhere.
        loss: the user's loss function and weight.
        batches: knows which target the last stage has already.
        rank: this rank.
        output_rank: the rank of the last partition.
        device: this stage's device.
    """

    def __init__(
        self,
        issue_or_follow: Callable[..., Order],
        loss: Loss,
        batches: Batches,
        rank: int,
        output_rank: int,
        device: torch.device,
    ) -> None:
        self._issue_or_follow = issue_or_follow
        self._loss = loss
        self._batches = batches
        self._rank = rank
        self._output_rank = output_rank
        self._device = device

    def begin(
        self,
        call: str,
        inputs: Inputs,
        target: Any,
        total_weight: Any = None,
        *,
        chunks: int,
        checkpoint: str,
        is_training: bool,
    ) -> tuple[Order, MiniBatch, Ingoing | None]:
        """Scatter the mini-batch and issue its order on rank 0; follow the order elsewhere.

        Args:
            call: "step" or "forward".
            inputs: on rank 0, the model's inputs.
            target: of a "step", what ``loss_fn`` gets; on rank 0, or else on the last stage.
            total_weight: of a "step", on rank 0, what its loss is divided by, if not its weight.
            chunks: on rank 0, the number of micro-batches.
            checkpoint: on rank 0, what is recomputed.
            is_training: whether the stage is in training mode.
        """
        if self._rank != 0:
            order, ingoing = self._issue_or_follow(call), None
        else:
            ingoing = Ingoing.of(inputs, chunks, self._device)  # step 1
            keeps = is_training and torch.is_grad_enabled()
            total = checked_total(total_weight)
            order = self._issue(call, ingoing, target, total, checkpoint, keeps=keeps)
        return order, self._mini_batch(call, order, target, ingoing), ingoing

    def _issue(
        self,
        call: str,
        ingoing: Ingoing,
        target: Any,
        total_weight: float | None,
        checkpoint: str,
        *,
        keeps: bool,
    ) -> Order:
        sizes = ingoing.sizes
        decided: dict[str, Any] = {
            "sizes": sizes,
            "input_bytes": num_bytes(ingoing.inputs[0].tensors),  # the first is the largest
            "recompute": tuple(sorted(recomputed(checkpoint, len(sizes)))) if keeps else (),
        }
        if call == "step":
            decided["target"] = self._way_of(target)
            decided["total_weight"] = total_weight
            if self._loss.weight is None or decided["target"] != LOCAL:
                parts = scatter_like(target, sizes) if self._loss.weight else None
                decided["weights"] = self._loss.weights(parts, sizes)
        return self._issue_or_follow(call, **decided)

    def _way_of(self, target: Any) -> str:
        """Return how the target of a step gets to the last stage."""
        if target is None or self._output_rank == 0:
            return LOCAL
        return DELIVERED if self._batches.has_delivered(target) else ROUTED

    def _mini_batch(
        self, call: str, order: Order, target: Any, ingoing: Ingoing | None
    ) -> MiniBatch:
        inputs = ingoing.inputs if ingoing else None
        if call != "step":
            return MiniBatch(inputs, keep=order.is_grad_enabled)
        is_sender = self._rank == 0 and order.target == ROUTED
        is_user = self._rank == self._output_rank and order.target != ROUTED
        if is_user and order.target == DELIVERED:
            target = self._batches.delivered_target
        given = None  # on the user's device: if that is a CPU, loss_weight waits for no GPU
        if (is_sender or is_user) and target is not None:
            given = scatter_like(target, order.sizes)
        loss = None
        if self._rank == self._output_rank:
            weights = order.weights or self._loss.weights(given, order.sizes)
            loss = MeanLoss(self._loss, weights, order.total_weight, is_sent=not order.weights)
        targets = None if given is None else [on_device(part, self._device) for part in given]
        may_correct = (
            order.keeps_graph and order.total_weight is None and self._loss.is_sum is not False
        )
        return MiniBatch(inputs, targets, loss, keep=order.keeps_graph, may_correct=may_correct)
